// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The mailboxes of an address field such as From (RFC 5322 section 3.4, groups as in RFC 6854).
 *
 * A strict reader for decisions: the value is divided first and nothing in it is decoded, so a
 * name that holds an address, encoded or quoted, is only a name. Obsolete blanks, comments and
 * routes are read. Pure.
 */
import * as Address from "./Address.ts"

/** Mailboxes of one field that are read; a longer list is taken as malformed. */
const maxMailboxes = 1000

interface Token {
  /** A special character, or what kind of text. */
  readonly kind: "word" | "quoted" | "literal" | "<" | ">" | "@" | "," | ";" | ":" | "."
  readonly text: string
}

const tokenPattern = new RegExp(
  [
    /[ \t\r\n]+/,
    /"(?<quoted>(?:[^"\\\0]|\\[^\0])*)"/,
    /(?<literal>\[[^[\]\\\0]*\])/,
    /(?<special>[<>@,;:.])/,
    /(?<word>[^\s()<>[\]:;@\\,."\0]+)/
  ]
    .map(({ source }) => source)
    .join("|"),
  "y"
)

/**
 * The mailboxes of an unfolded value, in their order. Empty = there is none that a careful reader
 * would be sure of: the value is empty or malformed anywhere.
 */
export const parse = (value: string): ReadonlyArray<Address.Address> => {
  const tokens = tokenize(value)
  if (tokens === undefined) return []
  const found: Array<Address.Address> = []
  let open: Array<Token> = []
  let isName = true
  let inGroup = false
  /** Ends the mailbox that is open, if one is; false = it is none. */
  const close = (): boolean => {
    const address = open.length === 0 ? undefined : readMailbox(open)
    if (address !== undefined) found.push(address)
    const isFine = open.length === 0 || (address !== undefined && found.length <= maxMailboxes)
    open = []
    isName = true
    return isFine
  }
  for (const token of tokens) {
    if (token.kind === ":" && isName && open.length > 0 && !inGroup) {
      inGroup = true
      open = []
    } else if (token.kind === ";") {
      if (!inGroup || !close()) return []
      inGroup = false
    } else if (token.kind === ",") {
      // "Doe, Jane <jane@…>" is one author whose name should have been quoted.
      if (!isName && !close()) return []
    } else {
      open.push(token)
      isName &&= isPhrase(token)
    }
  }
  return close() && !inGroup ? found : []
}

/** Comments (nested, RFC 5322 section 3.2.2) and blanks are dropped; undefined = malformed. */
const tokenize = (value: string): ReadonlyArray<Token> | undefined => {
  const tokens: Array<Token> = []
  let at = 0
  while (at < value.length) {
    if (value[at] === "(") {
      const end = commentEnd(value, at)
      if (end === undefined) return undefined
      at = end
      continue
    }
    tokenPattern.lastIndex = at
    const groups = tokenPattern.exec(value)?.groups
    if (groups === undefined) return undefined
    at = tokenPattern.lastIndex
    const token = toToken(groups)
    if (token !== undefined) tokens.push(token)
  }
  return tokens
}

/** undefined = blanks. */
const toToken = (groups: { readonly [name: string]: string | undefined }): Token | undefined => {
  const { literal, quoted, special, word } = groups
  if (special !== undefined) return { kind: special as Token["kind"], text: special }
  if (quoted !== undefined) return { kind: "quoted", text: quoted.replace(/\\([^])/g, "$1") }
  if (literal !== undefined) return { kind: "literal", text: literal.replace(/\s/g, "") }
  return word === undefined ? undefined : { kind: "word", text: word }
}

const commentEnd = (value: string, from: number): number | undefined => {
  let depth = 0
  for (let at = from; at < value.length; at++) {
    const c = value[at]
    if (c === "\0") return undefined
    if (c === "\\") at++
    else if (c === "(") depth++
    else if (c === ")" && --depth === 0) return at + 1
  }
  return undefined
}

const isPhrase = ({ kind }: Token): boolean => kind === "word" || kind === "quoted" || kind === "."

/** `name <address>` or a bare address. */
const readMailbox = (tokens: ReadonlyArray<Token>): Address.Address | undefined => {
  const angle = tokens.findIndex(({ kind }) => kind === "<")
  if (angle === -1) return readAddress(tokens)
  if (tokens.at(-1)!.kind !== ">") return undefined
  const inside = tokens.slice(angle + 1, -1)
  if (inside[0]?.kind !== "@") return readAddress(inside)
  // RFC 5322 section 4.4: an obsolete route before the address.
  return readAddress(inside.slice(inside.findIndex(({ kind }) => kind === ":") + 1))
}

const readAddress = (tokens: ReadonlyArray<Token>): Address.Address | undefined => {
  const at = tokens.findIndex(({ kind }) => kind === "@")
  const local = joined(tokens.slice(0, Math.max(at, 0)))
  const domain = joined(tokens.slice(at + 1))
  if (local === undefined || domain === undefined) return undefined
  return Address.parse(Address.format({ local, domain }))
}

const isText = (kind: Token["kind"]): boolean =>
  kind === "word" || kind === "quoted" || kind === "literal"

/** Words with dots between them, as one text. */
const joined = (tokens: ReadonlyArray<Token>): string | undefined => {
  const alternates = tokens.every(({ kind }, i) => (i % 2 === 0 ? isText(kind) : kind === "."))
  return alternates && tokens.length % 2 === 1 ? tokens.map(({ text }) => text).join("") : undefined
}
