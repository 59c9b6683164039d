// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The registry of state keys: what a row's `state` may hold, who writes a key and who reads it.
 * A stage writes only its own keys; nobody uses a key that is not here. Pure.
 */

/** The result of one DKIM signature (RFC 8601 section 2.7.1). */
export interface DkimResult {
  readonly d: string
  readonly s: string
  readonly a: string
  readonly result: string
  readonly aligned: boolean
  /** The first octets of the signature, which tell two of one domain apart (RFC 6008). */
  readonly b?: string
  /** Why it is no pass, in a few words. */
  readonly reason?: string
}

/** What authentication found on entry; taken once and kept with the row. */
export interface Auth {
  readonly spf: string
  readonly spf_domain: string | null
  /** Which identity SPF looked at (RFC 7208 section 2.3, 2.4); absent = none. */
  readonly spf_identity?: "mailfrom" | "helo"
  readonly dkim: ReadonlyArray<DkimResult>
  readonly dmarc: string
  readonly dmarc_policy: string | null
  readonly dmarc_domain: string | null
  readonly arc: "none" | "pass" | "fail"
  readonly arc_i: number
  readonly arc_sealers: ReadonlyArray<string>
  readonly from_domain: string | null
  readonly aligned: boolean
}

/** The peer that handed the message to us. */
export interface Client {
  readonly ip: string
  readonly port: number
  readonly helo: string
  readonly rdns?: string
  readonly tls?: { readonly version: string; readonly cipher: string }
  readonly proto: string
  readonly listener: string
}

/** Parameters of the envelope that later hops need (RFC 6152, RFC 6531, RFC 3461). */
export interface EnvelopeParameters {
  readonly body?: "7BIT" | "8BITMIME"
  readonly smtputf8?: boolean
}

/** Why a message failed, for the report that tells its sender. */
export interface Failure {
  readonly stage: string
  readonly class: string
  readonly status: string
  readonly text: string
}

/** The keys of `state`. Unknown keys of rows made by SQL are carried along untouched. */
export interface State {
  /** ingress, inject: the message was made here (authenticated or local). Read by arc, if. */
  readonly local_origin?: boolean
  /** ingress: login of the authenticated user. Read by if and by the fair key of SQL rows. */
  readonly user?: string
  /** ingress; deleted by arc unless KEEP_CLIENT. Read by arc. */
  readonly client?: Client
  /** ingress. Read by relays. */
  readonly env?: EnvelopeParameters
  /** arc. Read by if and the gates. */
  readonly auth?: Auth
  /** arc: name of the ARC set we added, so that a second pass adds nothing. Read by arc. */
  readonly sealed?: string
  /** Whoever rewrites a recipient: the address as it came in. Read by local. */
  readonly orig_rcpt?: string
  /** injectors, check-whitelist, anti-spam: absent undecided, false cleared, true spam. */
  readonly spam?: boolean
  /** the worker, when a stage fails a message; `crash_write`. Read by bounce. */
  readonly failure?: Failure
  /** `expire_parked`: what the message had waited for. */
  readonly park_expired?: string
  readonly [key: string]: unknown
}

/** Every key above, for the checks of `tidy` and of SQL callers. */
export const keys: ReadonlyArray<string> = [
  "local_origin",
  "user",
  "client",
  "env",
  "auth",
  "sealed",
  "orig_rcpt",
  "spam",
  "failure",
  "park_expired"
]

/** Largest state a row may have, octets of its JSON (the table checks 64 KiB of its own format). */
export const maxBytes = 48 * 1024
