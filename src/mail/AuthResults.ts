// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Authentication-Results (RFC 8601): how our field is written, and which fields claim to be ours.
 *
 * Nothing here reads a result out of a field: a decision is made from the typed findings only,
 * because anybody can write the field (RFC 8601 section 7.1). Pure.
 */
import * as Address from "./Address.ts"
import * as Header from "./Header.ts"

/** What was found out about one message; the words are those of RFC 8601 section 2.7. */
export interface Findings {
  readonly spf: string
  readonly spf_domain: string | null
  readonly spf_identity?: "mailfrom" | "helo"
  readonly dkim: ReadonlyArray<{
    readonly d: string
    readonly s: string
    readonly a: string
    readonly result: string
    readonly b?: string
    readonly reason?: string
  }>
  readonly dmarc: string
  readonly dmarc_policy: string | null
  readonly arc: string
  readonly arc_i: number
  readonly from_domain: string | null
}

const name = "Authentication-Results"
/** RFC 5322 section 2.1.1 asks for lines of 78; a method is not torn apart to reach it. */
const lineAim = 78
/** From here on a method is torn apart, so that no line comes near the 998 that are the limit. */
const methodMax = 200
/** Characters of one value: a domain has 253, and whatever is longer says nothing. */
const valueMax = 255
const reasonMax = 80

/** RFC 2045 section 5.1: what needs no quotes. */
const token = /^[!#$%&'*+\-.0-9A-Z^_`a-z{|}~]+$/

/** Only what can stand in a field of ASCII: the values come out of a stranger's message. */
const clean = (text: string, max: number): string =>
  text
    .slice(0, max)
    .replace(/\p{Cc}+/gu, " ")
    .replace(/[^ -~]/g, "?")
    .trim()

/** pvalue (RFC 8601 section 2.2): a token as it is, all else quoted: it cannot end early. */
const pvalue = (text: string): string => {
  const value = clean(text, valueMax)
  return token.test(value) ? value : `"${value.replace(/[\\"]/g, "\\$&")}"`
}

type Words = ReadonlyArray<string>

const property = (key: string, text: string | null | undefined): Words =>
  text === null || text === undefined || text === "" ? [] : [`${key}=${pvalue(text)}`]

/** A comment (RFC 5322 section 3.2.2). */
const comment = (text: string | undefined): Words => {
  const shown = clean(text ?? "", reasonMax)
  return shown === "" ? [] : [`(${shown.replace(/[\\()]/g, "\\$&")})`]
}

const keyword = (text: string): string => text.replace(/[^A-Za-z0-9-]/g, "") || "none"

const spf = ({ spf: result, spf_domain, spf_identity }: Findings): Words => [
  `spf=${keyword(result)}`,
  ...(spf_identity === undefined ? [] : property(`smtp.${spf_identity}`, spf_domain))
]

const dkim = (found: Findings): ReadonlyArray<Words> =>
  found.dkim.length === 0
    ? [["dkim=none"]]
    : found.dkim.map((one) => [
        `dkim=${keyword(one.result)}`,
        ...comment(one.reason),
        ...property("header.d", one.d),
        ...property("header.s", one.s),
        ...property("header.a", one.a),
        ...property("header.b", one.b) // RFC 6008
      ])

const dmarc = (found: Findings): Words => {
  const policy = found.dmarc_policy
  const disposition = found.dmarc === "fail" ? policy : "none"
  return [
    `dmarc=${keyword(found.dmarc)}`,
    ...(policy === null ? [] : [`(p=${keyword(policy)} dis=${keyword(disposition ?? "none")})`]),
    ...property("header.from", found.from_domain)
  ]
}

const arc = (found: Findings): Words => [
  `arc=${keyword(found.arc)}`,
  ...(found.arc_i > 0 ? [`(i=${found.arc_i})`] : [])
]

/**
 * The value of our field, folded. It depends on the findings alone, so that writing it twice gives
 * the same octets. smtp.remote-ip is left out: Received has it, and it is nobody else's business.
 */
export const value = (id: string, found: Findings): string => {
  const methods = [spf(found), ...dkim(found), dmarc(found), arc(found)]
  const last = methods.length - 1
  const units = methods.flatMap((words, i) => {
    const text = words.join(" ") + (i === last ? "" : ";")
    return text.length <= methodMax ? [text] : text.split(/ (?=[a-z]+\.[a-z]+=)/)
  })
  return fold(`${clean(id, valueMax)};`, units)
}

const fold = (head: string, units: ReadonlyArray<string>): string => {
  const lines = [head]
  let room = lineAim - `${name}: ${head}`.length
  for (const unit of units) {
    if (unit.length + 1 <= room) {
      lines[lines.length - 1] += ` ${unit}`
      room -= unit.length + 1
    } else {
      lines.push(` ${unit}`)
      room = lineAim - unit.length - 1
    }
  }
  return lines.join("\r\n")
}

/** Our field as whole lines. */
export const field = (id: string, found: Findings): string => `${name}: ${value(id, found)}\r\n`

/** Offset behind blanks and comments, or undefined if a comment does not end. */
const skipCfws = (text: string, from: number): number | undefined => {
  let depth = 0
  for (let at = from; at < text.length; at++) {
    const char = text[at]!
    if (char === "(") depth++
    else if (depth > 0 && char === "\\") at++
    else if (depth > 0 && char === ")") depth--
    else if (depth === 0 && !/\s/.test(char)) return at
  }
  return depth === 0 ? text.length : undefined
}

/** The authserv-id (RFC 8601 section 2.2), a token or a quoted string, in any case. */
const authservId = (text: string): string | undefined => {
  const at = skipCfws(text, 0)
  if (at === undefined) return undefined
  const quoted = /"((?:[^"\\]|\\.)*)"/y
  quoted.lastIndex = at
  const found = quoted.exec(text)?.[1]?.replace(/\\(.)/g, "$1")
  // A foreign version behind a slash, and whatever else a token cannot hold, ends it.
  return found ?? /^[^\s()<>@,;:\\"/[\]?=]+/.exec(text.slice(at))?.[0]
}

const canonical = (id: string): string => {
  const bare = id.trim().replace(/\.+$/, "").toLowerCase()
  return Address.domainToAscii(bare) ?? bare
}

/**
 * Whether a field's value claims to come from the host `id` (RFC 8601 section 5): by the letter,
 * and, where it cannot be read, by naming us at all.
 */
export const claims = (text: string, id: string): boolean => {
  const named = authservId(text)
  const ours = canonical(id)
  return named === undefined
    ? (text.split(";")[0] ?? "").toLowerCase().includes(ours)
    : canonical(named) === ours
}

const claiming =
  (header: Header.Header, id: string) =>
  (field: Header.Field): boolean =>
    field.name.toLowerCase() === "authentication-results" && claims(Header.value(header, field), id)

/** The header without the fields that claim to be ours (RFC 8601 section 5); foreign ones stay. */
export const withoutClaims = (header: Header.Header, id: string): Header.Header =>
  Header.remove(header, claiming(header, id))

/**
 * The header with our field and no other that claims to be ours. If ours is there already, and
 * alone, the header stays as it is.
 */
export const stamp = (header: Header.Header, id: string, found: Findings): Header.Header => {
  const ours = field(id, found)
  const claimed = header.fields.filter(claiming(header, id))
  const only = claimed.length === 1 ? claimed[0] : undefined
  const isThere =
    only !== undefined &&
    Buffer.from(header.raw.subarray(only.start, only.end)).toString("latin1") === ours
  return isThere ? header : Header.prepend(withoutClaims(header, id), ours)
}
