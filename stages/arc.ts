// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * arc: finds out whether a message comes from where it says (SPF, DKIM, DMARC, ARC), writes it down
 * in the state and in Authentication-Results (RFC 8601), and seals it for later hops (RFC 8617).
 *
 * Never fails a message; trouble with the key holds it only where sealing is all there is to do.
 * Header, state and seal are one patch; a second run finds its own state and changes nothing.
 */
import * as Effect from "effect/Effect"
import * as Result from "effect/Result"
import * as Option from "../src/config/Option.ts"
import * as AuthResults from "../src/mail/AuthResults.ts"
import * as Dmarc from "../src/mail/Dmarc.ts"
import * as Header from "../src/mail/Header.ts"
import * as Stage from "../src/pipeline/Stage.ts"
import type { Auth, State } from "../src/pipeline/State.ts"
import * as Verdict from "../src/pipeline/Verdict.ts"
import { MailAuth } from "../src/services/MailAuth.ts"

const selector = /^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$/

const settings = {
  MODE: Option.choice(["verify+seal", "verify", "seal"], {
    doc: "What is done here; a seal belongs behind the last stage that changes the message.",
    default: "verify+seal"
  }),
  AUTHSERV_ID: Option.optional(
    Option.domain({ doc: "Our name in Authentication-Results; not written = that of [pepsi]." })
  ),
  SEAL_DOMAIN: Option.optional(
    Option.domain({ doc: "The domain that seals; not written = HOSTNAME." })
  ),
  SEAL_SELECTOR: Option.custom(
    "a selector",
    "arc",
    { doc: "Names the key within SEAL_DOMAIN.", default: "arc" },
    (value) => (selector.test(value) ? Result.succeed(value) : Result.fail(""))
  ),
  SEAL_KEY: Option.optional(
    Option.file({ doc: "The private key in PEM; not written = one is made, its record beside it." })
  ),
  DNS_TIMEOUT: Option.duration({
    between: ["100 ms", "1 min"],
    doc: "The longest wait for one answer of the DNS.",
    default: "5 s"
  }),
  BUDGET: Option.duration({
    between: ["1 s", "2 min"],
    doc: "The longest wait for all answers together; what is missing then is temperror.",
    default: "20 s"
  }),
  MAX_SIGNATURES: Option.int({
    min: 1,
    max: 10,
    doc: "DKIM signatures that are looked at, from the top.",
    default: "10"
  }),
  MIN_RSA: Option.int({
    min: 1024,
    max: 4096,
    doc: "Bits of the smallest RSA key that counts (RFC 8301).",
    default: "1024"
  }),
  DMARC_REJECT: Option.choice(["tag", "discard", "quarantine"], {
    doc: "Mail that fails DMARC is only marked, dropped where p=reject, or sent to POLICY_FAIL.",
    default: "tag"
  }),
  POLICY_FAIL: Option.optional(
    Option.section({ doc: "Takes mail its author's domain disowns, unless DMARC_REJECT is tag." })
  ),
  KEEP_CLIENT: Option.yesNo({
    doc: "Whether the address of the peer stays in the state.",
    default: "no"
  })
}

type Settings = Option.Values<typeof settings>

export default Stage.define({
  name: "arc",
  load: "full",
  effect: "none",
  fusible: true,
  next: "required",
  uses: [MailAuth],
  settings,
  run: Effect.fnUntraced(function* (mail, settings) {
    const mailAuth = yield* MailAuth
    const authservId = settings.AUTHSERV_ID ?? mailAuth.authservId
    const found = yield* findings(mailAuth, mail, settings)
    // What was made here was not authenticated, whatever its header says.
    const unmarked = () => AuthResults.withoutClaims(mail.header, authservId)
    if (found === undefined) return leave(mail, settings, { header: unmarked() })
    if (found.isNew && Dmarc.isUnjudged(found.auth) && mail.attempts === 0) {
      return Verdict.defer("4.4.3 the DNS has no answer for DMARC yet", "30 seconds")
    }
    const header = AuthResults.stamp(mail.header, authservId, found.auth)
    if (!found.maySeal) return leave(mail, settings, { header, found })
    const domain = settings.SEAL_DOMAIN ?? mailAuth.hostname
    const key = { domain, selector: settings.SEAL_SELECTOR, keyFile: settings.SEAL_KEY }
    const sealing = mailAuth.seal({ header, body: mail.body, authservId, ...found, ...key })
    // Trouble with our key, which the service logs, does not hold mail that has been verified.
    const orNone = Effect.orElseSucceed(sealing, () => undefined)
    const set = yield* settings.MODE === "seal" ? sealing : orNone
    if (set === undefined) return leave(mail, settings, { header, found })
    const sealed = `i=${set.instance}; d=${key.domain}; s=${key.selector}`
    return leave(mail, settings, { header: Header.prepend(header, set.fields), found, sealed })
  })
})

interface Found {
  readonly auth: Auth
  /** Found in this run: not in the state yet. */
  readonly isNew: boolean
  readonly maySeal: boolean
  readonly bodyHash: string | undefined
}

/** What is known of a foreign message, from an earlier run or now; undefined = there is nothing. */
const findings = Effect.fnUntraced(function* (
  mailAuth: MailAuth["Service"],
  mail: Stage.WithBody,
  settings: Settings
) {
  const { auth, client, local_origin, sealed } = mail.state
  if (local_origin === true) return undefined
  const maySeal = settings.MODE !== "verify" && sealed === undefined
  const known: Found | undefined = auth && { auth, isNew: false, maySeal, bodyHash: undefined }
  if (known !== undefined || settings.MODE === "seal") return known
  const { body, header, sender } = mail
  const verified = yield* mailAuth.verify(
    { client, sender, header, body },
    {
      lookup: settings.DNS_TIMEOUT,
      total: settings.BUDGET,
      signatures: settings.MAX_SIGNATURES,
      minRsaBits: settings.MIN_RSA
    }
  )
  return { ...verified, isNew: true, maySeal: maySeal && verified.bodyHash !== undefined }
})

/** Where the message goes. Nothing is dropped but what its author's domain says to reject. */
export const judge = (
  auth: Auth,
  { DMARC_REJECT, POLICY_FAIL }: Pick<Settings, "DMARC_REJECT" | "POLICY_FAIL">
): Verdict.Verdict => {
  const disposition = Dmarc.disposition(auth)
  if (DMARC_REJECT === "tag" || disposition === "none") return Verdict.pass
  if (DMARC_REJECT === "discard" && disposition === "reject") return Verdict.done
  return POLICY_FAIL === undefined ? Verdict.pass : Verdict.passTo(POLICY_FAIL)
}

type Leaving = { readonly header: Header.Header; readonly found?: Found; readonly sealed?: string }

/** The verdict with all that has changed, and nothing that has not. */
const leave = (mail: Stage.WithBody, settings: Settings, { found, header, sealed }: Leaving) => {
  const state: State = {
    ...(found?.isNew === true ? { auth: found.auth } : {}),
    ...(sealed === undefined ? {} : { sealed })
  }
  const forgets = mail.state.client !== undefined && !settings.KEEP_CLIENT
  return Verdict.withPatch(found === undefined ? Verdict.pass : judge(found.auth, settings), {
    ...(header === mail.header ? {} : { header }),
    ...(Object.keys(state).length === 0 ? {} : { state }),
    ...(forgets ? { unset: ["client"] } : {})
  })
}
