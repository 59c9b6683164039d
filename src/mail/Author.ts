// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Who a message says it is from: the one Author Domain (RFC 9989 section 5.3.1) or none.
 *
 * A field that two programs may read in two ways has no author: what a policy rests on must not
 * depend on whose parser is right. Pure.
 */
import * as Result from "effect/Result"
import * as Address from "./Address.ts"
import * as Header from "./Header.ts"
import * as Mailboxes from "./Mailboxes.ts"

/** Why there is no Author Domain, in the words an operator reads. */
export type Refusal = "no From" | "more than one From" | "malformed From" | "several author domains"

/** Characters of a From; a longer one is no honest list of authors. */
const maxLength = 16 * 1024

/** The Author Domain in A-labels, lower case. */
export const domain = (header: Header.Header): Result.Result<string, Refusal> => {
  const values = Header.all(header, "From")
  if (values.length === 0) return Result.fail("no From")
  // RFC 5322 section 3.6: at most one.
  if (values.length > 1) return Result.fail("more than one From")
  const authors = read(values[0]!)
  const [first, ...others] = new Set(authors.map(domainOf))
  if (first === undefined) return Result.fail("malformed From")
  return others.length === 0 ? Result.succeed(first) : Result.fail("several author domains")
}

const read = (value: string): ReadonlyArray<Address.Address> => {
  // Control characters and broken UTF-8 are shown differently by every program.
  const isOdd = value.length > maxLength || /\p{Cc}|\ufffd/u.test(value.replaceAll("\t", " "))
  const authors = isOdd ? [] : Mailboxes.parse(value)
  return isPlain(value, authors) ? authors : []
}

/** undefined = an address literal, which has no records and can be no Author Domain. */
const domainOf = ({ domain }: Address.Address): string | undefined =>
  domain.startsWith("[") ? undefined : Address.domainToAscii(domain)

/**
 * Whether every "@" is that of an author and has his local part and domain right at its sides.
 * Blanks and comments there are obsolete syntax (RFC 5322 section 4.4): in `a@bank.example
 * .evil.example` and in `a@bank.example <a@evil.example>` some readers see only the bank.
 */
const isPlain = (value: string, authors: ReadonlyArray<Address.Address>): boolean => {
  const [head = "", ...tails] = withoutNames(value).toLowerCase().split("@")
  return (
    tails.length === authors.length &&
    !/\s$/.test(head) &&
    tails.every((tail, i) => {
      const { domain } = authors[i]!
      const isLast = i === tails.length - 1
      return (
        tail.startsWith(domain) &&
        /^(?:[\s>,;]|$)/.test(tail.slice(domain.length)) &&
        (isLast || !/\s$/.test(tail))
      )
    })
  )
}

/** The value with a letter for each quoted string and a blank for each comment. */
const withoutNames = (value: string): string => {
  let text = ""
  let depth = 0
  let isQuoted = false
  for (let at = 0; at < value.length; at++) {
    const char = value[at]!
    if ((isQuoted || depth > 0) && char === "\\") at++
    else if (depth === 0 && char === '"') {
      isQuoted = !isQuoted
      text += isQuoted ? "q" : ""
    } else if (!isQuoted && char === "(") depth++
    else if (depth > 0 && char === ")") text += --depth === 0 ? " " : ""
    else if (!isQuoted && depth === 0) text += char
  }
  return text
}
