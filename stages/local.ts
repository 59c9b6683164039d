// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * local: final delivery into the mailboxes of the people here (RFC 5321 section 4.4, RFC 9228).
 *
 * Reads the whole message and never changes it. Each recipient gets a file whose name is made
 * from the message and the recipient, so a second run finds what the first has delivered.
 */
import * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import * as Result from "effect/Result"
import * as Option from "../src/config/Option.ts"
import * as Header from "../src/mail/Header.ts"
import * as Maildir from "../src/mail/Maildir.ts"
import * as Status from "../src/mail/Status.ts"
import * as Stage from "../src/pipeline/Stage.ts"
import * as Verdict from "../src/pipeline/Verdict.ts"
import type { Resolution } from "../src/services/Accounts.ts"
import { Accounts } from "../src/services/Accounts.ts"
import { Mailbox } from "../src/services/Mailbox.ts"

const maildir: Option.Option<Maildir.Template> = {
  ...Option.custom(
    "a directory with {mailbox} in it",
    "/var/mail/{domain}/{mailbox}",
    {
      doc: "The Maildir of a mailbox; the directories before the one with {mailbox} are made.",
      default: "$PEPSI_HOME/mail/{mailbox}"
    },
    Maildir.template
  ),
  file: true
}

/** Recipients of one message that are written at once: each has a file open. */
const concurrency = 16

export default Stage.define({
  name: "local",
  load: "full",
  effect: "keyed",
  fusible: true,
  next: "none",
  uses: [Accounts, Mailbox],
  settings: {
    MAILDIR: maildir,
    DELIVERED_TO: Option.yesNo({
      doc: "Whether a Delivered-To field names the recipient.",
      default: "yes"
    })
  },
  run: Effect.fnUntraced(function* (mail, settings) {
    const accounts = yield* Accounts
    const mailbox = yield* Mailbox
    const found = yield* accounts.resolve(mail.recipients)
    const header = withoutReturnPath(mail.header)
    const troubles = yield* Effect.forEach(
      mail.recipients,
      (recipient, i) => {
        const place = placeOf(settings.MAILDIR, recipient, found[i])
        if ("status" in place) return Effect.succeed({ recipient, failure: place })
        const delivery = { ...letter(mail, recipient, settings.DELIVERED_TO), ...place, header }
        return Effect.map(Effect.result(mailbox.deliver(delivery)), (result) =>
          Result.isFailure(result) ? { recipient, failure: result.failure } : undefined
        )
      },
      { concurrency }
    )
    return decide(
      mail,
      troubles.filter((trouble) => trouble !== undefined)
    )
  })
})

/** Foreign Return-Path fields end here: that of the final delivery is the only one. */
const withoutReturnPath = (header: Header.Header): Uint8Array =>
  Header.remove(header, ({ name }) => name.toLowerCase() === "return-path").raw

/** A recipient that did not get the message. */
interface Trouble {
  readonly recipient: string
  readonly failure: Verdict.WorldFailure
}

/** Where the mail of a recipient goes, or why it does not. */
const placeOf = (
  template: Maildir.Template,
  recipient: string,
  resolution: Resolution | undefined
): Maildir.Place | Verdict.WorldFailure => {
  if (resolution?._tag !== "Local") return { status: "5.1.1", message: "nobody here" }
  const domain = recipient.slice(recipient.lastIndexOf("@") + 1).toLowerCase()
  return (
    Maildir.place(template, { mailbox: resolution.mailbox, domain }) ?? {
      status: "4.3.5",
      message: "the mailbox has a name that is no directory"
    }
  )
}

/** What is the recipient's own: the name of the file and the fields of the final delivery. */
const letter = (mail: Stage.WithBody, recipient: string, deliveredTo: boolean) => {
  const seconds = Math.floor(DateTime.toEpochMillis(mail.receivedAt) / 1000)
  const original = mail.state["orig_rcpt"]
  const isOther = typeof original === "string" && original !== recipient
  return {
    name: Maildir.deliveryName(seconds, mail.token, recipient),
    // An earlier try may have failed when its file was there already.
    repeat: mail.repeat || mail.attempts > 0,
    preface:
      Maildir.line("Return-Path", `<${mail.sender}>`) + // RFC 5321 section 4.4
      (deliveredTo ? Maildir.line("Delivered-To", recipient) : "") + // RFC 9228
      (isOther ? Maildir.line("X-Original-To", original) : ""),
    body: mail.body
  }
}

/**
 * Who has got the message leaves it. The rest waits or fails; where some wait and some fail, those
 * that fail go on as a message of their own, which comes here again and then fails as a whole.
 */
const decide = (mail: Stage.WithBody, troubles: ReadonlyArray<Trouble>): Verdict.Verdict => {
  const [first] = troubles
  if (first === undefined) return Verdict.done
  const waiting = troubles.filter(({ failure }) => Status.isTransient(failure.status))
  const failing = troubles.filter(({ failure }) => !Status.isTransient(failure.status))
  const kept = waiting.length > 0 ? waiting : failing
  const verdict = Verdict.fromFailure(kept[0]!.failure)
  const rest =
    kept.length === mail.recipients.length
      ? verdict
      : Verdict.withPatch(verdict, { recipients: recipientsOf(kept) })
  if (waiting.length === 0 || failing.length === 0) return rest
  const recipients = recipientsOf(failing)
  const key = recipients.toSorted().join("\n")
  return Verdict.fanout([{ key, to: mail.section, recipients }], rest)
}

const recipientsOf = (troubles: ReadonlyArray<Trouble>): ReadonlyArray<string> =>
  troubles.map(({ recipient }) => recipient)
