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
/** Octets of a body that is hashed: the largest message that can be let in. */
const maxBody = 100 * 1024 * 1024
/**
 * Lines of the body: one that ends in blanks takes 0.4 µs each time it is hashed, so this many take
 * 0.6 s a time. 100 MiB in lines of 72 octets have as many.
 */
const maxBodyLines = 1_500_000
/** How nearly all signers have the body hashed; it is always done, for the seal. */
const commonHashing = "relaxed:sha256:"
/**
 * Other ways in which signatures may have it hashed; the newest ARC set may add one more. Honest
 * signers use "simple" (RFC 6376 section 3.4.3) and perhaps one `l=`.
 */
const maxHashings = 2
/** Octets hashed in other ways; of 50 MiB, the largest message by default, both are possible. */
const maxHashed = 100 * 1024 * 1024
/** Octets of the header: each signature canonicalises it all (ten times 1 MiB took 0.2 s). */
const maxHeader = 1024 * 1024
/** Lines of the header: those of one field are joined in quadratic time (40,000 took 3 s). */
const maxHeaderLines = 10_000
/** Octets of a field that is parsed and not only hashed. Honest ones have 2 KiB. */
const maxField = 8 * 1024
/**
 * Blanks in a row in such a field: a list of tags is parsed in the square of them (60,000 took
 * 1.1 s, 7,800 in each field of 50 ARC sets took 2 s). Folding makes about ten.
 */
const maxBlanks = 128
/** Names in h=: each is looked for among all fields. The longest honest lists have a hundred. */
const maxSigned = 1_000
/** RFC 8617 section 4.2.1: 50 sets of three fields. */
const maxArcFields = 150
/** Octets of all ARC fields: each seal hashes the sets before it. 50 sets of 5 KiB have as many. */
const maxArc = 256 * 1024
/** Key names that are looked up ahead; the budget of a message has no more for keys. */
const maxKeyNames = 12

const TAB = 9
const LF = 10
const CR = 13
const SPACE = 32

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

const hasMoreLines = (octets: Uint8Array, max: number): boolean => {
  if (octets.length <= max) return false
  let lines = 0
  for (let at = 0; at < octets.length; at++) {
    if (octets[at] === LF && ++lines > max) return true
  }
  return false
}

/** Whether a CR stands alone: a row of them is looked at in its square (500,000 took 86 s). */
const hasBareCr = (octets: Uint8Array): boolean => {
  for (let at = octets.indexOf(CR); at !== -1; at = octets.indexOf(CR, at + 2)) {
    if (octets[at + 1] !== LF) return true
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

type Tags = ReadonlyMap<string, string>

const isFrom = ({ name }: Header.Field): boolean => /^from$/i.test(name)
const isSignature = ({ name }: Header.Field): boolean => /^dkim-signature$/i.test(name)
const isSeal = ({ name }: Header.Field): boolean => /^arc-(seal|message-signature)$/i.test(name)
const isArc = (field: Header.Field): boolean =>
  isSeal(field) || /^arc-authentication-results$/i.test(field.name)

const isContentType = ({ name }: Header.Field): boolean => /^content-type$/i.test(name)

const sizeOf = ({ end, start }: Header.Field): number => end - start
const isLong = (field: Header.Field): boolean => sizeOf(field) > maxField

const isBlank = (octet: number): boolean =>
  octet === SPACE || octet === TAB || octet === CR || octet === LF

const hasLongGap = ({ raw }: Header.Header, { end, start }: Header.Field): boolean => {
  let blanks = 0
  for (let at = start; at < end; at++) {
    blanks = isBlank(raw[at]!) ? blanks + 1 : 0
    if (blanks > maxBlanks) return true
  }
  return false
}

const signsTooMuch = (tags: Tags): boolean =>
  (tags.get("h") ?? "").split(":", maxSigned + 1).length > maxSigned

/** The tags of a field, as far as it is read. */
const tagsOf = (header: Header.Header, field: Header.Field): Tags => {
  const end = Math.min(field.end, field.valueStart + maxField)
  return TagList.parse(Header.value(header, { ...field, end }))
}

/** Why a field of tags cannot be parsed; undefined = it can. */
const fault = (header: Header.Header, field: Header.Field, tags: Tags): string | undefined => {
  if (isLong(field)) return "too long"
  if (hasLongGap(header, field)) return "too many blanks"
  return signsTooMuch(tags) ? "too many signed names" : undefined
}

const arcFault = (header: Header.Header): string | undefined => {
  const fields = header.fields.filter(isArc)
  if (fields.length > maxArcFields) return "too many ARC sets"
  if (fields.reduce((sum, field) => sum + sizeOf(field), 0) > maxArc) return "ARC sets too long"
  const isFaulty = (field: Header.Field) =>
    fault(header, field, tagsOf(header, field)) !== undefined
  return fields.some(isFaulty) ? "ARC field too long" : undefined
}

const headerFault = (header: Header.Header): string | undefined => {
  if (header.raw.length > maxHeader) return "header too long"
  if (!isWhole(header) || hasBareCr(header.raw)) return "malformed header"
  if (hasMoreLines(header.raw, maxHeaderLines)) return "too many header lines"
  if (header.fields.some((field) => isFrom(field) && isLong(field))) return "From too long"
  const isLongType = (field: Header.Field) => isContentType(field) && isLong(field)
  if (header.fields.some(isLongType)) return "Content-Type too long"
  return arcFault(header)
}

const bodyFault = (body: Uint8Array): string | undefined => {
  if (body.length > maxBody) return "body too long"
  if (hasLongLine(body)) return "line too long"
  return hasMoreLines(body, maxBodyLines) ? "too many lines" : undefined
}

/** Why neither signatures nor seals can be looked at; undefined = they can. */
export const refusal = (header: Header.Header, body: Uint8Array): string | undefined =>
  headerFault(header) ?? bodyFault(body)

/** A signature of the message. */
export interface Claim {
  readonly field: Header.Field
  readonly tags: Tags
  /** Why it is not looked at; undefined = it is. */
  readonly refused: string | undefined
}

/**
 * How a signature has the body hashed (RFC 6376 section 3.5); equal ways are hashed once. Never
 * equal where the library sees a difference.
 */
const hashing = (tags: Tags): string => {
  const algorithm = (tags.get("a") ?? "").split("-").at(-1)
  const canonicalization = (tags.get("c") ?? "").split("/")[1]?.trim().toLowerCase() || "simple"
  return [canonicalization, algorithm, tags.get("l")].join(":")
}

/**
 * The first `max` signatures; those behind them do not exist (RFC 6376 section 6.1 lets a verifier
 * limit their number).
 */
export const claims = (
  { body, header }: { readonly body: Uint8Array; readonly header: Header.Header },
  max: number
): ReadonlyArray<Claim> => {
  const most = Math.min(maxHashings, Math.floor(maxHashed / Math.max(1, body.length)))
  const hashings = new Set([commonHashing])
  const surplus = (tags: Tags): string | undefined => {
    const way = hashing(tags)
    if (!hashings.has(way) && hashings.size > most) return "too many body hashes"
    hashings.add(way)
    return undefined
  }
  const claim = (field: Header.Field): Claim => {
    const tags = tagsOf(header, field)
    return { field, tags, refused: fault(header, field, tags) ?? surplus(tags) }
  }
  return header.fields.filter(isSignature).slice(0, max).map(claim)
}

const isSeen = ({ refused }: Claim): boolean => refused === undefined

/** The header without the signatures that are not looked at. */
export const trim = (header: Header.Header, found: ReadonlyArray<Claim>): Header.Header => {
  const kept = new Set(found.filter(isSeen).map(({ field }) => field))
  return Header.remove(header, (field) => isSignature(field) && !kept.has(field))
}

/** Whether the message claims to have been sealed. */
export const hasArc = (header: Header.Header): boolean => header.fields.some(isArc)

/**
 * Where the keys lie that verification will ask for, so that they can be asked for at once; those
 * of DKIM first, because their number is bounded already.
 */
export const keyNames = (
  header: Header.Header,
  found: ReadonlyArray<Claim>
): ReadonlyArray<string> => {
  const signatures = found.filter(isSeen).map(({ tags }) => tags)
  const seals = header.fields.filter(isSeal).map((field) => tagsOf(header, field))
  const names = [...signatures, ...seals].map(TagList.keyName)
  return [...new Set(names.filter((name) => name !== undefined))].slice(0, maxKeyNames)
}
