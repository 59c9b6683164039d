// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * What a DMARC result asks of the receiver (RFC 9989 section 5.4). Pure.
 */

/** The part of the findings that this rests on. */
export interface Findings {
  readonly dmarc: string
  readonly dmarc_policy: string | null
  readonly aligned: boolean
}

/**
 * What the author's domain wants done. Without one author domain nobody has asked for anything;
 * such a message is suspicious (RFC 9989 section 11.5): it counts as quarantine, never as none.
 */
export const disposition = ({
  dmarc,
  dmarc_policy
}: Findings): "none" | "quarantine" | "reject" => {
  if (dmarc === "permerror") return "quarantine"
  const isAsked = dmarc === "fail" && (dmarc_policy === "reject" || dmarc_policy === "quarantine")
  return isAsked ? dmarc_policy : "none"
}

/** The DNS had no answer and nothing else speaks for the author: later it may be different. */
export const isUnjudged = ({ aligned, dmarc }: Findings): boolean =>
  dmarc === "temperror" && !aligned
