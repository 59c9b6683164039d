// SPDX-License-Identifier: AGPL-3.0-or-later
/** The domain name system, as mail authentication and delivery need it. */
import * as Context from "effect/Context"
import type * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"

export type RecordType = "A" | "AAAA" | "MX" | "TXT" | "PTR" | "CNAME"

/**
 * absent: the name or the type does not exist: a true answer ·
 * trouble: no answer (SERVFAIL, timeout, refused): asking again later may help.
 */
export class DnsError extends Schema.TaggedError<DnsError>()("DnsError", {
  reason: Schema.Literals(["absent", "trouble"]),
  /**
   * Finer, where a caller must tell: nxdomain and nodata are absences of the name and of the type
   * (RFC 2308), name is what cannot be a name in the DNS, timeout and server are trouble.
   */
  detail: Schema.optional(Schema.Literals(["nxdomain", "nodata", "name", "timeout", "server"])),
  name: Schema.String,
  type: Schema.String,
  cause: Schema.Defect()
}) {
  readonly status = "4.4.3" as const
  override get message(): string {
    return `${this.type} ${this.name}: ${this.detail ?? this.reason}`
  }
}

export class Dns extends Context.Service<
  Dns,
  {
    /**
     * The records of a name: TXT as one string each, MX as "preference exchange", the others as
     * text; never an empty list. Answers and absences are cached for a bounded time, trouble is
     * not; equal questions in flight are asked once. What `isName` refuses is absent. Returns
     * within the time of the layer, 5 s by default.
     */
    readonly resolve: (
      name: string,
      type: RecordType
    ) => Effect.Effect<ReadonlyArray<string>, DnsError>
  }
>()("pepsi/services/Dns") {}

/** Octets of a name without its last dot, and of a label (RFC 1035 section 2.3.4). */
const maxName = 253
const maxLabel = 63

/**
 * Whether a text can be asked for: labels of 1 to 63 octets, 253 together, of the characters that
 * the resolver of Node sends. RFC 2181 section 11 allows every octet; names with others occur where
 * SPF expands a macro into one, and such a term then is a permanent error.
 */
export const isName = (name: string): boolean => {
  const bare = name.endsWith(".") ? name.slice(0, -1) : name
  return (
    bare.length > 0 &&
    bare.length <= maxName &&
    /^[A-Za-z0-9._*/-]+$/.test(bare) &&
    bare.split(".").every((label) => label.length > 0 && label.length <= maxLabel)
  )
}
