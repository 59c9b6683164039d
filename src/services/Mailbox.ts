// SPDX-License-Identifier: AGPL-3.0-or-later
/** Where mail for the people here is kept. */
import * as Context from "effect/Context"
import type * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type { Status } from "../mail/Status.ts"

/** A mailbox could not take a message. `status` says whether later may help (RFC 3463). */
export class MailboxError extends Schema.TaggedError<MailboxError>()("MailboxError", {
  status: Schema.String,
  detail: Schema.String,
  cause: Schema.Defect()
}) {
  declare readonly status: Status
  override get message(): string {
    return this.detail
  }
}

/** One message for one mailbox. */
export interface Delivery {
  /** The mailbox directory; made if the one it is in exists or is `root`. */
  readonly directory: string
  /** A directory above it that is ours: made with all above it if it is missing. */
  readonly root: string
  /**
   * Names the delivery for ever: the same name is the same delivery. Begins the file name, without
   * "/" and without what follows it (host, sizes).
   */
  readonly name: string
  /** An earlier run may have delivered it already: look for `name` first. */
  readonly repeat: boolean
  /** Octets to put before the message, LF line ends (Return-Path, Delivered-To). */
  readonly preface: string
  /** CRLF octets; written with LF. */
  readonly header: Uint8Array
  readonly body: Uint8Array
}

export class Mailbox extends Context.Service<
  Mailbox,
  {
    /**
     * Delivers and returns when the message is on disk: file and directory synced. Deliveries that
     * arrive together share directory syncs. Delivering the same name again changes nothing when
     * `repeat` is set or the file is still in new/.
     */
    readonly deliver: (delivery: Delivery) => Effect.Effect<"delivered" | "was there", MailboxError>
  }
>()("pepsi/services/Mailbox") {}
