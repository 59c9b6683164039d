// SPDX-License-Identifier: AGPL-3.0-or-later
/** Handing a message to another server. */
import * as Context from "effect/Context"
import type * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type { Status } from "../mail/Status.ts"

/**
 * The message was not taken for anybody. `reply` is what the server said, if it came to that;
 * `status` says whether later may help (RFC 3463).
 */
export class TransportError extends Schema.TaggedError<TransportError>()("TransportError", {
  status: Schema.String,
  /** What was tried, "connection to 127.0.0.1 port 25". */
  operation: Schema.String,
  reply: Schema.optional(Schema.String),
  cause: Schema.Defect()
}) {
  declare readonly status: Status
  override get message(): string {
    const why = this.cause instanceof Error ? this.cause.message : "failed"
    return `${this.operation}: ${this.reply ?? why}`
  }
}

/** One message for one or more recipients. */
export interface Outgoing {
  /** "" = the null sender. */
  readonly sender: string
  readonly recipients: ReadonlyArray<string>
  /** The whole message; line ends become CRLF, dots are added. */
  readonly octets: Uint8Array
}

/** What the server said. */
export interface Handed {
  /** Its final reply. */
  readonly reply: string
  readonly accepted: ReadonlyArray<string>
  /** Recipients it refused, with its reply to each. */
  readonly refused: ReadonlyArray<{ readonly recipient: string; readonly reply: string }>
}

export class Transport extends Context.Service<
  Transport,
  {
    /** Hands a message over; succeeds when the server took it for at least one recipient. */
    readonly submit: (outgoing: Outgoing) => Effect.Effect<Handed, TransportError>
  }
>()("pepsi/services/Transport") {}
