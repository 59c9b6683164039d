// SPDX-License-Identifier: AGPL-3.0-or-later
/** Encoded words in unstructured text (RFC 2047, with the language of RFC 2231 section 5). Pure. */
import * as Result from "effect/Result"

/**
 * Characters that are looked at; a subject longer than this is cut. Sixteen times the line that
 * RFC 5322 section 2.1.1 allows is more than any reader shows.
 */
const maxInput = 16 * 998

const word = /=\?([^?*\s]{1,64})(?:\*[^?\s]{0,64})?\?([bq])\?([^?\s]*)\?=/gi

interface Piece {
  readonly charset: string
  readonly octets: Buffer
}

/**
 * Decodes what can be decoded and leaves the rest as it is; never fails. The result may hold any
 * character, line ends included: who puts it into a header or on a terminal cleans it first.
 */
export const decode = (text: string): string => {
  const input = text.slice(0, maxInput)
  if (!input.includes("=?")) return input
  let out = ""
  let behind = 0
  let open: Piece | undefined
  for (const found of input.matchAll(word)) {
    const between = input.slice(behind, found.index)
    const piece = read(found)
    // Section 6.2: blanks between two encoded words belong to neither.
    const joins = open !== undefined && /^\s*$/.test(between)
    if (joins && piece?.charset === open!.charset) {
      // Broken senders cut a character in two: octets of one charset are decoded together.
      open = { charset: piece.charset, octets: Buffer.concat([open!.octets, piece.octets]) }
    } else {
      out += shown(open) + (joins && piece !== undefined ? "" : between)
      open = piece
    }
    if (piece === undefined) out += found[0]
    behind = found.index + found[0].length
  }
  return out + shown(open) + input.slice(behind)
}

const read = ([, charset, encoding, payload]: RegExpMatchArray): Piece | undefined => {
  const octets =
    encoding!.toLowerCase() === "b" ? Buffer.from(payload!, "base64") : unquote(payload!)
  const known = decoder(charset!)
  return known && { charset: known.encoding, octets }
}

/** Section 4.2. An "=" that no two hexadecimal digits follow stands for itself. */
const unquote = (payload: string): Buffer =>
  Buffer.from(
    Buffer.from(payload, "utf8")
      .toString("latin1")
      .replaceAll("_", " ")
      .replace(/=([0-9a-f]{2})/gi, (_, hex: string) => String.fromCharCode(parseInt(hex, 16))),
    "latin1"
  )

const shown = (piece: Piece | undefined): string =>
  piece === undefined ? "" : decoder(piece.charset)!.decode(piece.octets)

type Decoder = InstanceType<typeof TextDecoder>

/** Decoders by label. Labels come from outside; only those that exist are kept, a few hundred. */
const decoders = new Map<string, Decoder>()

const decoder = (label: string): Decoder | undefined => {
  const key = label.toLowerCase()
  const known = decoders.get(key)
  if (known !== undefined) return known
  const made = Result.try(() => new TextDecoder(key))
  if (Result.isFailure(made)) return undefined
  decoders.set(key, made.success)
  return made.success
}
