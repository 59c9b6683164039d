// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The header block of a message as octets with an index of its fields (RFC 5322 section 2.2).
 *
 * A header is CRLF lines without the empty line that ends it. Fields are only removed whole or
 * put on top whole: what is not touched keeps every octet, so signatures keep verifying. Pure.
 */

/** One field; `start` and `end` are octet offsets in the block, the last CRLF included. */
export interface Field {
  /** As written, without the colon and without blanks before it. */
  readonly name: string
  readonly start: number
  readonly end: number
  /** Where the octets behind the colon begin. */
  readonly valueStart: number
}

/** A header block. Equal octets, equal header. */
export interface Header {
  readonly raw: Uint8Array
  readonly fields: ReadonlyArray<Field>
}

const CR = 13
const LF = 10
const COLON = 58

const isBlank = (octet: number | undefined): boolean => octet === 32 || octet === 9

/** Offset behind the line that starts at `from`. */
const lineEnd = (raw: Uint8Array, from: number): number => {
  const lf = raw.indexOf(LF, from)
  return lf === -1 ? raw.length : lf + 1
}

/**
 * Indexes a block in one pass. A line that is neither a field nor a continuation is kept in `raw`
 * and belongs to no field (admission moves such lines into the body).
 */
export const parse = (raw: Uint8Array): Header => {
  const fields: Array<Field> = []
  let at = 0
  while (at < raw.length) {
    const start = at
    at = lineEnd(raw, at)
    while (at < raw.length && isBlank(raw[at])) at = lineEnd(raw, at)
    const colon = colonOf(raw, start, at)
    if (colon === -1) continue
    fields.push({ name: nameBefore(raw, start, colon), start, end: at, valueStart: colon + 1 })
  }
  return { raw, fields }
}

/**
 * Where the colon of the field on the line from `start` is, -1 if the line is no field: printable
 * ASCII, then a colon; blanks before the colon are obsolete syntax that is still read (RFC 5322
 * section 4.5).
 */
const colonOf = (raw: Uint8Array, start: number, end: number): number => {
  let at = start
  while (at < end && raw[at]! > 32 && raw[at]! < 127 && raw[at] !== COLON) at++
  if (at === start) return -1
  while (at < end && isBlank(raw[at])) at++
  return raw[at] === COLON ? at : -1
}

/** The octets from `start` to `colon` without blanks at their end. */
const nameBefore = (raw: Uint8Array, start: number, colon: number): string => {
  let end = colon
  while (isBlank(raw[end - 1])) end--
  return Buffer.from(raw.buffer, raw.byteOffset + start, end - start).toString("latin1")
}

/** No field at all. */
export const empty: Header = { raw: new Uint8Array(0), fields: [] }

/** From text lines as we write them ourselves; every line must end with CRLF. */
export const fromText = (text: string): Header => parse(Buffer.from(text, "utf8"))

const same = (a: string, b: string): boolean =>
  a.length === b.length && a.toLowerCase() === b.toLowerCase()

/**
 * The value of a field, unfolded and without outer blanks; octets that are no UTF-8 become U+FFFD.
 */
export const value = (header: Header, field: Field): string =>
  Buffer.from(
    header.raw.buffer,
    header.raw.byteOffset + field.valueStart,
    field.end - field.valueStart
  )
    .toString("utf8")
    .replace(/\r?\n(?=[ \t])/g, "")
    .trim()

/** The values of all fields of that name, in their order. */
export const all = (header: Header, name: string): ReadonlyArray<string> =>
  header.fields.filter((field) => same(field.name, name)).map((field) => value(header, field))

/** The value of the first field of that name. */
export const first = (header: Header, name: string): string | undefined => {
  const field = header.fields.find((f) => same(f.name, name))
  return field === undefined ? undefined : value(header, field)
}

/** How many fields have that name. */
export const count = (header: Header, name: string): number =>
  header.fields.reduce((n, field) => (same(field.name, name) ? n + 1 : n), 0)

/** Whether one of the names is there. */
export const hasAny = (header: Header, names: ReadonlyArray<string>): boolean =>
  header.fields.some((field) => names.some((name) => same(field.name, name)))

/** The header without the fields for which `drop` holds. */
export const remove = (header: Header, drop: (field: Field) => boolean): Header => {
  const kept: Array<Uint8Array> = []
  let from = 0
  for (const field of header.fields) {
    if (!drop(field)) continue
    kept.push(header.raw.subarray(from, field.start))
    from = field.end
  }
  if (from === 0) return header
  kept.push(header.raw.subarray(from))
  return parse(Buffer.concat(kept))
}

/** The header with whole field lines on top; each must end with CRLF. */
export const prepend = (header: Header, lines: string | Uint8Array): Header =>
  parse(Buffer.concat([typeof lines === "string" ? Buffer.from(lines, "utf8") : lines, header.raw]))

/**
 * Where the header of a whole message ends: `headerEnd` = offset behind its last line, `bodyStart`
 * = first octet of the body. A line that is no field and no continuation ends the header, and the
 * body begins with it. Lines end with CRLF here; admission sees to that.
 *
 * A header of more than `maxBytes` is cut behind the line that makes it so: who sets a limit wants
 * no more of it, and 50 MB of tiny fields would hold everybody else up for seconds.
 */
export const split = (
  message: Uint8Array,
  maxBytes = Infinity
): { readonly headerEnd: number; readonly bodyStart: number } => {
  let at = 0
  while (at < message.length && at <= maxBytes) {
    if (message[at] === CR && message[at + 1] === LF) return { headerEnd: at, bodyStart: at + 2 }
    const end = lineEnd(message, at)
    const continues = at > 0 && isBlank(message[at])
    if (!continues && colonOf(message, at, end) === -1) break
    at = end
  }
  return { headerEnd: at, bodyStart: at }
}
