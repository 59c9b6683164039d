// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Enhanced status codes (RFC 3463) and what they mean for a retry. Pure.
 */

/** class.subject.detail; class 4 is tried again, class 5 is not, class 2 went well. */
export type Status = `${2 | 4 | 5}.${number}.${number}`

/** Whether trying again later may help (RFC 3463 section 3.1). */
export const isTransient = (status: Status): boolean => status.startsWith("4")

/** What a status says to a sender; never more than the code itself says (RFC 3463 section 3). */
export const text = (status: Status): string =>
  texts[status] ?? (isTransient(status) ? "try again later" : "not accepted")

const texts: { readonly [status: string]: string } = {
  "4.2.1": "mailbox not available at the moment",
  "4.2.2": "mailbox full",
  "4.3.0": "temporary trouble on our side",
  "4.3.1": "no space left at the moment",
  "4.3.2": "not accepting messages at the moment",
  "4.4.3": "name server did not answer",
  "4.4.7": "delivery time expired",
  "5.1.1": "no such recipient",
  "5.2.2": "mailbox full",
  "5.3.0": "trouble on our side",
  "5.3.4": "message too large",
  "5.4.6": "mail loop",
  "5.6.0": "malformed message",
  "5.7.1": "not permitted"
}
