// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * A whole message divided into what a row keeps of it (RFC 5322). Octets are never changed: header
 * and body are views of the message. Pure.
 */
import * as Address from "./Address.ts"
import * as EncodedWord from "./EncodedWord.ts"
import * as Header from "./Header.ts"
import * as Mailboxes from "./Mailboxes.ts"

/** What the columns say about a message; texts are clean, see `clean`. */
export interface Summary {
  /** Address of the first author; null = From is missing or malformed. */
  readonly fromHeader: string | null
  readonly subject: string | null
  /** With its angle brackets, as In-Reply-To and References name it. */
  readonly messageId: string | null
  /** Without its angle brackets, in lower case: RFC 2919 section 6 compares so. */
  readonly listId: string | null
}

/** Characters of a column; RFC 5322 section 2.1.1 bounds a line so, and nobody reads more. */
const maxText = 998

/**
 * Header and body; the empty line between them belongs to neither. A header of more than
 * `maxHeaderBytes` is cut a little behind them.
 */
export const split = (
  message: Uint8Array,
  maxHeaderBytes = Infinity
): { readonly header: Uint8Array; readonly body: Uint8Array } => {
  const { bodyStart, headerEnd } = Header.split(message, maxHeaderBytes)
  return { header: message.subarray(0, headerEnd), body: message.subarray(bodyStart) }
}

export const summarize = (header: Header.Header): Summary => {
  const from = Header.first(header, "From")
  const author = from === undefined ? undefined : Mailboxes.parse(from)[0]
  const subject = Header.first(header, "Subject")
  return {
    fromHeader: author === undefined ? null : clean(Address.format(author)),
    subject: subject === undefined ? null : clean(EncodedWord.decode(subject)),
    messageId: bracketed(Header.first(header, "Message-ID"), (id) => `<${id}>`),
    listId: bracketed(Header.first(header, "List-Id"), (id) => id.toLowerCase())
  }
}

/**
 * A text as a column or a terminal can take it: controls, NUL and line ends among them, are
 * blanks or gone, half characters are U+FFFD, and it is cut after 998 characters.
 */
export const clean = (text: string): string => {
  const shown = text
    .toWellFormed()
    .replaceAll("\0", "")
    .replace(/\p{Cc}/gu, " ")
    .trim()
  if (shown.length <= maxText) return shown
  return Array.from(shown.slice(0, 2 * maxText))
    .slice(0, maxText)
    .join("")
}

const bracketed = (value: string | undefined, make: (id: string) => string): string | null => {
  const id = /<\s*([^<>\s]+)\s*>/.exec(value ?? "")?.[1]
  return id === undefined ? null : clean(make(id))
}
