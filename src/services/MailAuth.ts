// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Whether a message comes from where it says: SPF (RFC 7208), DKIM (RFC 6376), DMARC (RFC 9989) and
 * ARC (RFC 8617), and the seal that hands our findings on.
 */
import * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import type * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type { Header } from "../mail/Header.ts"
import type { Auth } from "../pipeline/State.ts"

/** A seal could not be made. The message is as it was; the operator has to do something. */
export class SealError extends Schema.TaggedError<SealError>()("SealError", {
  /** key: the file is not there, not readable or no key · library: it did not make a set. */
  reason: Schema.Literals(["key", "library"]),
  detail: Schema.String,
  cause: Schema.Defect()
}) {
  // RFC 3463 section 3.4: system incorrectly configured, and a persistent transient failure.
  readonly status = "4.3.5" as const
  override get message(): string {
    return `seal: ${this.detail}`
  }
}

/** A message as it came in. */
export interface Arrival {
  /** Who handed it to us; undefined = not known, SPF is none. */
  readonly client: { readonly ip: string; readonly helo: string } | undefined
  /** MAIL FROM without brackets; "" = null sender, SPF looks at HELO. */
  readonly sender: string
  readonly header: Header
  readonly body: Uint8Array
}

/** What one verification may cost. */
export interface Limits {
  /** Of one look-up. */
  readonly lookup: Duration.Duration
  /** Of all look-ups together; what has no answer then is temperror. */
  readonly total: Duration.Duration
  /** DKIM signatures looked at, from the top. */
  readonly signatures: number
  /** Bits of the smallest RSA key that counts (RFC 8301 section 3.2). */
  readonly minRsaBits: number
}

export interface Verified {
  readonly auth: Auth
  /**
   * Base64 of the SHA-256 of the body in relaxed form, for a seal of the same body; undefined where
   * no seal may be made: the body cannot be canonicalised, or a key of the chain could not be
   * fetched, so that our `cv=fail` would break a chain that may be sound.
   */
  readonly bodyHash: string | undefined
}

/** What to seal, and with which key. */
export interface Seal {
  readonly header: Header
  readonly body: Uint8Array
  /** From `verify` of the same body; undefined = the body is hashed now. */
  readonly bodyHash: string | undefined
  /** The findings on entry (RFC 8617 section 5.1): `arc` becomes cv, all of it the AAR. */
  readonly auth: Auth
  readonly authservId: string
  readonly domain: string
  readonly selector: string
  /** A file with a private key in PEM; undefined = a key of our own, made at its first use. */
  readonly keyFile: string | undefined
}

/** A new ARC set. */
export interface Sealed {
  /** Its three fields in whole lines, for the top of the header. */
  readonly fields: string
  readonly instance: number
}

export class MailAuth extends Context.Service<
  MailAuth,
  {
    /** [pepsi] HOSTNAME. */
    readonly hostname: string
    /** Our name in Authentication-Results: [pepsi] AUTHSERV_ID, or HOSTNAME. */
    readonly authservId: string
    /**
     * Never fails: what cannot be found out is temperror, what cannot be right is permerror.
     * Returns within `limits.total` of waiting; look-ups of SPF, DKIM, ARC and DMARC run side by
     * side.
     */
    readonly verify: (arrival: Arrival, limits: Limits) => Effect.Effect<Verified>
    /**
     * The next set of the chain, or undefined where RFC 8617 wants none: the newest says cv=fail,
     * it has 50 sets, the body cannot be canonicalised, there is no From.
     */
    readonly seal: (seal: Seal) => Effect.Effect<Sealed | undefined, SealError>
  }
>()("pepsi/services/MailAuth") {}
