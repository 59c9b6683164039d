// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The duty that takes mail in: SMTP sessions on our listeners, recipients that are ours, and 250
 * only when the message is on disk (RFC 5321 section 6.1).
 */
import * as Clock from "effect/Clock"
import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Result from "effect/Result"
import { SecureRandom } from "effect/crypto/SecureRandom"
import * as Address from "../mail/Address.ts"
import * as Smtp from "../mail/Smtp.ts"
import { Accounts } from "../services/Accounts.ts"
import type { Resolution } from "../services/Accounts.ts"
import type { DatabaseError } from "../services/DatabaseError.ts"
import { SmtpServer } from "../services/SmtpServer.ts"
import type { Incoming, Listener, Service } from "../services/SmtpServer.ts"
import * as Admission from "./ingress/Admission.ts"
import * as Intake from "./ingress/Intake.ts"

export interface Settings extends Service, Admission.Settings, Intake.Settings {
  /** Stands for the recipient `<postmaster>`, which has no domain (RFC 5321 section 4.5.1). */
  readonly postmaster: string
}

export class Ingress extends Context.Service<
  Ingress,
  {
    /** The listeners with the ports they got. */
    readonly listeners: ReadonlyArray<Listener>
  }
>()("pepsi/daemon/Ingress") {}

const make = Effect.fnUntraced(function* (settings: Settings) {
  const accounts = yield* Accounts
  const random = yield* SecureRandom
  // Made before the listeners, so closed after them: every message they took gets its answer.
  const { admit } = yield* Admission.make(settings)
  const server = yield* SmtpServer

  const recipient = Effect.fnUntraced(
    function* (address: Address.Address) {
      const text = address.domain === "" ? settings.postmaster : Address.format(address)
      const [resolution] = yield* accounts.resolve([text])
      return recipientReply(resolution)
    },
    Effect.catch((error) => Effect.succeed(troubleReply(error)))
  )

  const message = Effect.fnUntraced(function* (incoming: Incoming) {
    const token = Buffer.from(yield* random.randomBytes(16)).toString("hex")
    const atMillis = yield* Clock.currentTimeMillis
    const row = Intake.toRow(withPostmaster(incoming, settings), { token, atMillis }, settings)
    if (Result.isFailure(row)) return row.failure
    const admitted = yield* Effect.result(admit(row.success))
    if (Result.isFailure(admitted)) return yield* notAdmitted(admitted.failure, token)
    return Smtp.reply(250, "2.0.0", `queued as ${token}`)
  })

  const listeners = yield* server.serve(settings, { recipient, message })
  for (const { address, name, port } of listeners) {
    yield* Effect.logInfo("listening for SMTP").pipe(
      Effect.annotateLogs({ listener: name, address, port })
    )
  }
  return Ingress.of({ listeners })
})

/** Takes mail in as long as the layer lives. Fails if a listener cannot be bound. */
export const layer = (settings: Settings) => Layer.effect(Ingress, make(settings))

const recipientReply = (resolution: Resolution | undefined): Smtp.Reply => {
  switch (resolution?._tag) {
    case "Local":
      return Smtp.reply(250, "2.1.5", "recipient ok")
    case "Unknown":
      return Smtp.unknownRecipient
    case "Foreign":
      return Smtp.reply(550, "5.7.1", "relaying denied")
    case undefined:
      return Smtp.temporary
  }
}

/** Trouble of ours is never a refusal. */
const troubleReply = ({ reason }: DatabaseError): Smtp.Reply =>
  reason === "overload"
    ? Smtp.reply(451, "4.3.2", "not accepting messages at the moment")
    : Smtp.temporary

/** Says so in the log, without the words of the server: they may quote the message. */
const notAdmitted = Effect.fnUntraced(function* (error: DatabaseError, token: string) {
  const { code, constraint, reason } = error
  const answer = Admission.isRefusal(error) ? Smtp.malformed : troubleReply(error)
  yield* Effect.logError("message not admitted").pipe(
    Effect.annotateLogs({
      token,
      sqlstate: code ?? "none",
      reason,
      reply: `${answer.code} ${answer.status}`,
      ...(constraint === undefined ? {} : { constraint })
    })
  )
  return answer
})

const withPostmaster = (incoming: Incoming, { postmaster }: Settings): Incoming => {
  const { recipients } = incoming
  const whole = Address.parse(postmaster)
  if (whole === undefined || recipients.every(({ domain }) => domain !== "")) return incoming
  return { ...incoming, recipients: recipients.map((one) => (one.domain === "" ? whole : one)) }
}
