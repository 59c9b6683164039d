// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Maildir without the disk: where a mailbox is, what a file in it is called, what its octets are
 * (https://cr.yp.to/proto/maildir.html, with the sizes of Maildir++ in the name). Pure.
 */
import { createHash } from "node:crypto"
import * as Result from "effect/Result"

const CR = 13
const LF = 10

/**
 * Names a delivery for ever: the same message to the same recipient has the same name, so that a
 * repeated delivery is seen. `seconds` = moment of admission since 1970.
 */
export const deliveryName = (seconds: number, token: string, recipient: string): string =>
  `${seconds}.T${nameable(token)}R${sha256(recipient).slice(0, 8)}`

/** A token from SQL may have any characters; in a name only letters and digits mean nothing. */
const nameable = (token: string): string =>
  /^[0-9A-Za-z]{1,64}$/.test(token) ? token : sha256(token).slice(0, 32)

const sha256 = (text: string): string => createHash("sha256").update(text).digest("hex")

/** The part of a file name that says which host made it; at most 100 octets,
  so that names fit in 255. */
export const hostPart = (host: string): string =>
  host
    .replaceAll("/", "\\057")
    .replaceAll(":", "\\072")
    .replace(/[^!-~]/g, "_")
    .slice(0, 100)

/**
 * The name in new/: `S` = octets of the file, `W` = octets with CRLF line ends. Readers take both
 * from the name and do not open the file for them.
 */
export const fileName = (delivery: string, host: string, sizes: Sizes): string =>
  `${delivery}.${host},S=${sizes.octets},W=${sizes.octets + sizes.lines}`

/** The delivery a file in new/ or cur/ is of; flags and sizes do not matter. */
export const deliveryOf = (file: string): string => {
  const second = file.indexOf(".", file.indexOf(".") + 1)
  return second === -1 ? file : file.slice(0, second)
}

/** What has been written so far. */
export interface Sizes {
  octets: number
  /** LF line ends. */
  lines: number
}

/**
 * Copies `input` from `from` on into `out` at `at`, CRLF as LF, until either ends. Gives where it
 * stopped in both; a CR alone is an octet like any other. `sizes` grows by what was copied.
 */
export const convert = (
  input: Uint8Array,
  out: Uint8Array,
  where: { from: number; at: number },
  sizes: Sizes
): void => {
  const start = where.at
  let { at, from } = where
  let lines = 0
  while (from < input.length && at < out.length) {
    const octet = input[from++]!
    if (octet === CR && input[from] === LF) continue
    if (octet === LF) lines++
    out[at++] = octet
  }
  sizes.octets += at - start
  sizes.lines += lines
  where.from = from
  where.at = at
}

/**
 * A header line of ours. What ends a line or a text for another program does not get into it
 * (RFC 5322 section 2.2).
 */
export const line = (name: string, value: string): string =>
  `${name}: ${value.replace(/\p{Cc}/gu, "")}\n`

/** Where mailboxes are: components of a path with {mailbox} and {domain} in them. */
export interface Template {
  readonly components: ReadonlyArray<string>
}

/** Reads a template; the failure says what is wrong. */
export const template = (text: string): Result.Result<Template, string> => {
  const components = text.replace(/\/+$/, "").split("/")
  const unknown = /\{(?!mailbox\}|domain\})[^/]{0,20}/.exec(text)
  if (unknown !== null) {
    return Result.fail(`it has ${unknown[0]}, where only {mailbox} and {domain} are known`)
  }
  if (!text.includes("{mailbox}")) {
    return Result.fail("it has no {mailbox}, so all mail would go to one place")
  }
  const first = components.findIndex((component) => component.includes("{"))
  return first === 0 || components.includes("..", first)
    ? Result.fail("it must begin with a directory, and have no .. behind a placeholder")
    : Result.succeed({ components })
}

/** A mailbox directory, and the directory above it that is ours to make. */
export interface Place {
  readonly directory: string
  /** All before the component that names the mailbox. */
  readonly root: string
}

/** Fills a template. undefined = a value would leave the place that is meant for it. */
export const place = (
  { components }: Template,
  values: { readonly mailbox: string; readonly domain: string }
): Place | undefined => {
  const usesDomain = components.some((component) => component.includes("{domain}"))
  if (!isName(values.mailbox) || (usesDomain && !isName(values.domain))) return undefined
  const filled = components.map((component) =>
    component.replace(/\{(mailbox|domain)\}/g, (_, key: "mailbox" | "domain") => values[key])
  )
  if (!filled.every((text, i) => text === components[i] || isComponent(text))) return undefined
  const own = components.findIndex((component) => component.includes("{mailbox}"))
  return { directory: filled.join("/"), root: filled.slice(0, own).join("/") || "/" }
}

const isName = (text: string): boolean => text !== "" && !/[/\p{Cc}]/u.test(text)

/** Whether it names something in the directory before it; a name has 255 octets at most. */
const isComponent = (text: string): boolean =>
  text !== "." && text !== ".." && Buffer.byteLength(text) <= 255
