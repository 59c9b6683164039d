// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Tag lists (RFC 6376 section 3.2), as DKIM-Signature, ARC-Seal and ARC-Message-Signature are made
 * of. For looking ahead only: the verifier judges the syntax. Pure.
 */

/** The tags by name, blanks around names and values gone; of equal names the last. */
export const parse = (text: string): ReadonlyMap<string, string> => {
  const tags = new Map<string, string>()
  for (const part of text.split(";")) {
    const at = part.indexOf("=")
    if (at > 0) tags.set(part.slice(0, at).trim(), part.slice(at + 1).trim())
  }
  return tags
}

/** Where the key of a signature lies (RFC 6376 section 3.6.2.1). */
export const keyName = (tags: ReadonlyMap<string, string>): string | undefined => {
  const domain = tags.get("d")
  const selector = tags.get("s")
  if (domain === undefined || selector === undefined) return undefined
  return `${selector}._domainkey.${domain}`
}
