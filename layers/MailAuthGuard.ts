// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * What the library that verifies is allowed to see. It has steps that grow with the square of
 * something a stranger chooses; each bound here keeps one of them small. Pure.
 */
import * as Header from "../src/mail/Header.ts"
import * as TagList from "../src/mail/TagList.ts"

/**
 * Octets of a line of the body: canonicalisation is quadratic in them (20 MB took 8 s, 64 KiB take
 * nothing). RFC 5321 section 4.5.3.1.6 allows 1,000.
 */
const maxLine = 64 * 1024
/** Lines of the header: those of one field are joined in quadratic time (40,000 took 3 s). */
const maxHeaderLines = 10_000
/** Octets of a field that is parsed and not only hashed. */
const maxField = 64 * 1024
/** Names in h=: each is looked for among all fields. The longest honest lists have a hundred. */
const maxSigned = 1_000
/** RFC 8617 section 4.2.1: 50 sets of three fields. */
const maxArcFields = 150
/** Key names that are looked up ahead; the budget of a message has no more for keys. */
const maxKeyNames = 12

const LF = 10

/** Whether a line is longer than the bound; looks at one octet in 64 KiB or so. */
export const hasLongLine = (octets: Uint8Array): boolean => {
  let start = 0
  while (start + maxLine < octets.length) {
    const lf = octets.lastIndexOf(LF, start + maxLine)
    if (lf < start) return true
    start = lf + 1
  }
  return false
}

const hasManyLines = (octets: Uint8Array): boolean => {
  let lines = 0
  for (let at = octets.indexOf(LF); at !== -1; at = octets.indexOf(LF, at + 1)) {
    if (++lines > maxHeaderLines) return true
  }
  return false
}

/** Whether every octet belongs to a field; admission sees to that, rows made by SQL may differ. */
const isWhole = ({ fields, raw }: Header.Header): boolean => {
  let at = 0
  for (const field of fields) {
    if (field.start !== at) return false
    at = field.end
  }
  return at === raw.length
}

const isFrom = ({ name }: Header.Field): boolean => /^from$/i.test(name)
const isSignature = ({ name }: Header.Field): boolean => /^dkim-signature$/i.test(name)
const isSeal = ({ name }: Header.Field): boolean => /^arc-(seal|message-signature)$/i.test(name)
const isArc = (field: Header.Field): boolean =>
  isSeal(field) || /^arc-authentication-results$/i.test(field.name)

const tooLong = (field: Header.Field): boolean => field.end - field.start > maxField

const signsTooMuch = (tags: ReadonlyMap<string, string>): boolean =>
  (tags.get("h") ?? "").split(":", maxSigned + 1).length > maxSigned

/** Why neither signatures nor seals can be looked at; undefined = they can. */
export const refusal = (header: Header.Header, body: Uint8Array): string | undefined => {
  if (!isWhole(header)) return "malformed header"
  if (hasManyLines(header.raw)) return "too many header lines"
  if (header.fields.some((field) => isFrom(field) && tooLong(field))) return "From too long"
  const arc = header.fields.filter(isArc)
  if (arc.length > maxArcFields) return "too many ARC sets"
  if (!arc.every((field) => isBearable(header, field))) return "ARC field too long"
  return hasLongLine(body) ? "line too long" : undefined
}

const isBearable = (header: Header.Header, field: Header.Field): boolean =>
  !tooLong(field) && !signsTooMuch(TagList.parse(Header.value(header, field)))

/**
 * The header without the signatures that are not looked at: those behind the first `max`, and those
 * of absurd size. Each costs a look-up (RFC 6376 section 6.1 lets a verifier limit their number).
 */
export const trim = (header: Header.Header, max: number): Header.Header => {
  const signatures = header.fields.filter(isSignature)
  const kept = new Set(signatures.filter((field) => isBearable(header, field)).slice(0, max))
  return Header.remove(header, (field) => isSignature(field) && !kept.has(field))
}

/** The tags of the first `max` signatures, for a message that the library does not get to see. */
export const signatureTags = (
  header: Header.Header,
  max: number
): ReadonlyArray<ReadonlyMap<string, string>> =>
  header.fields
    .filter(isSignature)
    .slice(0, max)
    .map((field) =>
      tooLong(field) ? new Map<string, string>() : TagList.parse(Header.value(header, field))
    )

/** Whether the message claims to have been sealed. */
export const hasArc = (header: Header.Header): boolean => header.fields.some(isArc)

const keyName =
  (header: Header.Header) =>
  (field: Header.Field): string | undefined =>
    TagList.keyName(TagList.parse(Header.value(header, field)))

/**
 * Where the keys lie that verification will ask for, so that they can be asked for at once; those
 * of DKIM first, because their number is bounded already.
 */
export const keyNames = (header: Header.Header): ReadonlyArray<string> => {
  const fields = [...header.fields.filter(isSignature), ...header.fields.filter(isSeal)]
  const names = fields.map(keyName(header)).filter((name) => name !== undefined)
  return [...new Set(names)].slice(0, maxKeyNames)
}
