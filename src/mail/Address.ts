// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Mailboxes and paths of the envelope (RFC 5321 section 4.1.2, RFC 6531 section 3.3). Pure.
 *
 * An address is read once, here, by its grammar: the domain is what follows the unquoted "@", so
 * an "@" or ">" inside quotes never moves mail to another domain.
 */
import * as Result from "effect/Result"
import * as Ip from "./Ip.ts"

/** A mailbox. */
export interface Address {
  /** What the quotes of a quoted local part enclose; case and every character as given. */
  readonly local: string
  /** Lower case, as given otherwise; `[...]` = address literal; "" = the bare `postmaster`. */
  readonly domain: string
}

/** What a path in angle brackets says. */
export interface Path {
  /** undefined = the null path `<>`. */
  readonly address: Address | undefined
  /** Offset behind the closing bracket. */
  readonly end: number
  /** Whether the path is ASCII as written. */
  readonly isAscii: boolean
}

/** Octets of a path with its brackets (RFC 5321 section 4.5.3.1.3). */
const maxPath = 256
/**
 * Octets of a domain (RFC 5321 section 4.5.3.1.2). The 64 octets of a local part are not enforced:
 * return paths of lists and forwarders are longer and the path as a whole is bounded.
 */
const maxDomain = 255
/** Octets of a label (RFC 1035 section 2.3.4). */
const maxLabel = 63

/**
 * UTF8-non-ascii (RFC 6531 section 3.3) without what cannot be seen: controls, blanks and formats,
 * which only serve to make two addresses look alike. Joiners are kept, some scripts need them.
 */
const beyondAscii = "[^\\p{ASCII}\\p{Cc}\\p{Cf}\\p{Cs}\\p{Z}\\u{FFFD}]\\u{200C}\\u{200D}"
const atext = `[A-Za-z0-9!#$%&'*+\\/=?^_\`\\{\\|\\}~\\-${beyondAscii}]`
const dotString = new RegExp(`${atext}+(?:\\.${atext}+)*`, "vy")
const quotedString = new RegExp(`"((?:[ !#-\\[\\]-~${beyondAscii}]|\\\\[ -~])*)"`, "vy")
const label = `[A-Za-z0-9\\-${beyondAscii}]+`
const domainName = new RegExp(`${label}(?:\\.${label})*`, "vy")
const literal = /\[([!-Z^-~]{1,255})\]/vy
const sourceRoute = new RegExp(`@${domainName.source}(?:,@${domainName.source})*:`, "vy")

const match = (pattern: RegExp, text: string, at: number): RegExpExecArray | undefined => {
  pattern.lastIndex = at
  return pattern.exec(text) ?? undefined
}

/** Reads the path that starts at `at`; a source route is read and dropped (RFC 5321 appendix C). */
export const readPath = (text: string, at: number): Result.Result<Path, "syntax" | "too long"> => {
  if (text[at] !== "<") return Result.fail("syntax")
  if (text[at + 1] === ">") {
    return Result.succeed({ address: undefined, end: at + 2, isAscii: true })
  }
  const start = at + 1 + (match(sourceRoute, text, at + 1)?.[0].length ?? 0)
  const read = readMailbox(text, start)
  if (read === undefined || text[read.end] !== ">") return Result.fail("syntax")
  const { address, end } = read
  if (Buffer.byteLength(format(address)) + 2 > maxPath) return Result.fail("too long")
  return Result.succeed({ address, end: end + 1, isAscii: isAscii(text.slice(at, end)) })
}

/** Reads a text that is a mailbox and nothing else. */
export const parse = (text: string): Address | undefined => {
  const read = readMailbox(text, 0)
  return read?.end === text.length && read.address.domain !== "" ? read.address : undefined
}

const readMailbox = (
  text: string,
  at: number
): { readonly address: Address; readonly end: number } | undefined => {
  const local = readLocal(text, at)
  if (local === undefined) return undefined
  if (text[local.end] !== "@") {
    // RFC 5321 section 4.1.1.3: the one recipient without a domain.
    const isPostmaster = local.text.toLowerCase() === "postmaster"
    return isPostmaster ? { address: { local: local.text, domain: "" }, end: local.end } : undefined
  }
  const domain = readDomain(text, local.end + 1)
  return domain && { address: { local: local.text, domain: domain.text }, end: domain.end }
}

interface Read {
  readonly text: string
  readonly end: number
}

const readLocal = (text: string, at: number): Read | undefined => {
  const quoted = match(quotedString, text, at)
  if (quoted !== undefined) {
    return { text: quoted[1]!.replace(/\\(.)/g, "$1"), end: at + quoted[0].length }
  }
  const plain = match(dotString, text, at)
  return plain && { text: plain[0], end: at + plain[0].length }
}

const readDomain = (text: string, at: number): Read | undefined => {
  const name = match(domainName, text, at)
  if (name !== undefined) {
    return isDomain(name[0]) ? { text: name[0].toLowerCase(), end: at + name[0].length } : undefined
  }
  const bracketed = match(literal, text, at)
  return bracketed && isLiteral(bracketed[1]!)
    ? { text: bracketed[0].replace(/^\[ipv6:/i, "[IPv6:"), end: at + bracketed[0].length }
    : undefined
}

/** RFC 5321 section 4.1.3. */
const isLiteral = (text: string): boolean =>
  /^ipv6:/i.test(text)
    ? text.includes(":", 5) && Ip.parse(text.slice(5)) !== undefined
    : !text.includes(":") && Ip.parse(text) !== undefined

const isDomain = (name: string): boolean => {
  const ascii = isAscii(name) ? name : domainToAscii(name)
  return ascii !== undefined && ascii.length <= maxDomain && ascii.split(".").every(isLabel)
}

const isLabel = (text: string): boolean =>
  text.length <= maxLabel && !text.startsWith("-") && !text.endsWith("-")

/**
 * A domain in A-labels, lower case: the form in which two domains are compared (RFC 5890 section
 * 2.3.2.4). undefined = it has none.
 */
export const domainToAscii = (domain: string): string | undefined => {
  if (isAscii(domain)) return domain.toLowerCase()
  const host = URL.parse(`http://${domain}/`)?.hostname
  // A name that becomes plain ASCII was written in look-alikes and is no U-label.
  return host !== undefined && /(?:^|\.)xn--/.test(host) ? host : undefined
}

export const isAscii = (text: string): boolean => !/[^\0-\x7f]/.test(text)

const plainLocal = new RegExp(`^(?:${dotString.source})$`, "v")

/** The text of an address, quoted only where it must be (RFC 5321 section 4.1.2). */
export const format = ({ domain, local }: Address): string => {
  const shown = plainLocal.test(local) ? local : `"${local.replace(/[\\"]/g, "\\$&")}"`
  return domain === "" ? shown : `${shown}@${domain}`
}

/**
 * The local part before its detail, and the detail: `dave+lists` is `dave` and `lists` (RFC 5233).
 * A delimiter in front is part of the name; an empty delimiter divides nothing.
 */
export const splitDetail = (
  local: string,
  delimiter: string
): { readonly name: string; readonly detail: string | undefined } => {
  const at = delimiter === "" ? -1 : local.indexOf(delimiter, 1)
  return at === -1
    ? { name: local, detail: undefined }
    : { name: local.slice(0, at), detail: local.slice(at + delimiter.length) }
}
