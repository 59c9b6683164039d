// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The text of the configuration: lines to sections and back, and `$VAR` in file names.
 *
 * The syntax is that of GNUnet and GNU Taler (taler.conf(5)): `[section]`, `OPTION = VALUE`,
 * comments on lines of their own, `@inline@`. One text is parsed here; who follows the inlines
 * joins the items and assembles them. Pure.
 */
import * as Result from "effect/Result"
import * as Schema from "effect/Schema"

/** Where something was written. Line 0 = in the file as a whole. */
export const Origin = Schema.Struct({ file: Schema.String, line: Schema.Int })
export type Origin = typeof Origin.Type

/** What is wrong, and where. */
export interface Problem {
  readonly origin: Origin
  readonly text: string
}

/** `FILE:LINE`. */
export const at = ({ file, line }: Origin): string => (line === 0 ? file : `${file}:${line}`)

/** `FILE:LINE: TEXT`. */
export const format = ({ origin, text }: Problem): string => `${at(origin)}: ${text}`

/** One `OPTION = VALUE`. Names compare without regard to case: section lower, option upper. */
export const Assignment = Schema.Struct({
  option: Schema.String,
  value: Schema.String,
  origin: Origin,
  /** It comes from a secret file and is never shown. */
  secret: Schema.Boolean
})
export type Assignment = typeof Assignment.Type

/** A section with the assignments that count: the last one of each option. */
export const Section = Schema.Struct({
  name: Schema.String,
  /** Every header of it; sections may be continued. */
  headers: Schema.NonEmptyArray(Origin),
  options: Schema.Array(Assignment)
})
export type Section = typeof Section.Type

/** All sections, in the order of their first headers. */
export type Document = ReadonlyArray<Section>

/** One meaningful line. */
export type Item =
  | { readonly _tag: "Header"; readonly section: string; readonly origin: Origin }
  | ({ readonly _tag: "Assignment"; readonly section: string } & Assignment)
  | { readonly _tag: "Inline"; readonly file: string; readonly origin: Origin }
  | { readonly _tag: "InlineMatching"; readonly pattern: string; readonly origin: Origin }
  | {
      readonly _tag: "InlineSecret"
      readonly section: string
      readonly file: string
      readonly origin: Origin
    }

/** What a text says, and every line of it that says nothing. */
export interface Parsed {
  readonly items: ReadonlyArray<Item>
  readonly problems: ReadonlyArray<Problem>
}

/** Far above any configuration written by hand; keeps a wrong file name from filling memory. */
export const maxFileBytes = 1024 * 1024
/** Room for a list of a thousand domains on one line. */
export const maxLineChars = 64 * 1024
/** Far above any wiring that a person can survey. */
export const maxSections = 1_000

/**
 * Control characters and the line ends of Unicode. None may stand in a value: it could end the
 * header field or the SMTP command that the value is put into.
 */
export const hasControl = (text: string): boolean =>
  // oxlint-disable-next-line no-control-regex -- control characters are what is looked for
  /[\u0000-\u0008\u000a-\u001f\u007f-\u009f\u2028\u2029]/.test(text)

const trimBlanks = (text: string): string => text.replace(/^[ \t]+|[ \t]+$/g, "")

/** A value wholly in quotes keeps its blanks; there are no escapes inside. */
const unquote = (value: string): string =>
  value.length >= 2 && value.startsWith('"') && value.endsWith('"') ? value.slice(1, -1) : value

const sectionName = /^[A-Za-z0-9._-]{1,72}$/
const optionName = /^[A-Za-z_][A-Za-z0-9_-]{0,63}$/

const directive = (line: string, origin: Origin): Item | string => {
  const match = /^@(inline|inline-matching|inline-secret)@[ \t]+(.*)$/i.exec(line)
  if (match === null) return "is none of @inline@ FILE, @inline-matching@ GLOB, @inline-secret@"
  const rest = unquote(match[2]!)
  switch (match[1]!.toLowerCase()) {
    case "inline":
      return { _tag: "Inline", file: rest, origin }
    case "inline-matching":
      return { _tag: "InlineMatching", pattern: rest, origin }
    default: {
      const secret = /^([^ \t]+)[ \t]+(.+)$/.exec(rest)
      if (secret === null || !sectionName.test(secret[1]!)) {
        return "needs a section and a file; example '@inline-secret@ pepsi-keys secrets.conf'"
      }
      const section = secret[1]!.toLowerCase()
      return { _tag: "InlineSecret", section, file: unquote(secret[2]!), origin }
    }
  }
}

const assignment = (line: string, section: string | undefined, origin: Origin): Item | string => {
  const equals = line.indexOf("=")
  if (equals === -1) return "is no section, no 'OPTION = VALUE' and no comment"
  const option = trimBlanks(line.slice(0, equals))
  if (!optionName.test(option)) return `'${option.slice(0, 64)}' is no name of an option`
  if (section === undefined) return `${option} stands before the first [section]`
  const value = unquote(trimBlanks(line.slice(equals + 1)))
  return { _tag: "Assignment", section, option: option.toUpperCase(), value, origin, secret: false }
}

/** What one line says: nothing, an item, or (a text) what is wrong with it. */
const item = (
  raw: string,
  section: string | undefined,
  origin: Origin
): Item | string | undefined => {
  if (raw.length > maxLineChars) return `is longer than ${maxLineChars} characters`
  const line = trimBlanks(raw)
  if (line === "" || line.startsWith("#") || line.startsWith("%")) return undefined
  if (hasControl(line)) return "holds a control character"
  if (line.includes("\uFFFD")) return "is not UTF-8"
  if (line.startsWith("@")) return directive(line, origin)
  if (!line.startsWith("[")) return assignment(line, section, origin)
  const name = line.endsWith("]") ? trimBlanks(line.slice(1, -1)) : ""
  return sectionName.test(name)
    ? { _tag: "Header", section: name.toLowerCase(), origin }
    : "is no section header; example '[stage-local]', with comments on lines of their own"
}

/** Reads one text. Total: what cannot be read is a problem with its line. */
export const parse = (file: string, text: string): Parsed => {
  const items: Array<Item> = []
  const problems: Array<Problem> = []
  let section: string | undefined
  let line = 0
  for (const raw of text.replace(/^\uFEFF/, "").split(/\r?\n/)) {
    const origin = { file, line: ++line }
    const found = item(raw, section, origin)
    if (found === undefined) continue
    if (typeof found === "string") problems.push({ origin, text: found })
    else {
      items.push(found)
      if (found._tag === "Header") section = found.section
    }
  }
  return { items, problems }
}

/** Joins items to sections. A later assignment overrides; directives say nothing here. */
export const assemble = (items: Iterable<Item>): Document => {
  const sections = new Map<
    string,
    {
      readonly headers: [Origin, ...Array<Origin>]
      readonly options: Map<string, Assignment>
    }
  >()
  for (const found of items) {
    if (found._tag === "Header") {
      const known = sections.get(found.section)
      if (known !== undefined) known.headers.push(found.origin)
      else sections.set(found.section, { headers: [found.origin], options: new Map() })
    } else if (found._tag === "Assignment") {
      const { option, origin, secret, value } = found
      sections.get(found.section)?.options.set(option, { option, value, origin, secret })
    }
  }
  return Array.from(sections, ([name, { headers, options }]) => ({
    name,
    headers,
    options: Array.from(options.values())
  }))
}

const quote = (value: string): string =>
  value !== trimBlanks(value) || value !== unquote(value) ? `"${value}"` : value

/** The text of an assignment, without the line end. */
export const printAssignment = (option: string, value: string): string =>
  `${option} =${value === "" ? "" : ` ${quote(value)}`}`

/** A text that reads as `document` again, but for the origins. */
export const print = (document: Document): string =>
  document
    .map(({ name, options }) => {
      const lines = options.map((one) => printAssignment(one.option, one.value))
      return [`[${name}]`, ...lines, ""].join("\n")
    })
    .join("\n")

/** What `$NAME` stands for. */
export interface Variables {
  /** Of `[PATHS]`, by upper-case name; expanded again. */
  readonly paths: ReadonlyMap<string, string>
  /** Of the environment, taken as it is: a `$` in there is not ours to interpret. */
  readonly environment: { readonly [name: string]: string }
}

/** An expanded text, and the names nothing is known of: they are left as they stand. */
export interface Expanded {
  readonly text: string
  readonly unknown: ReadonlyArray<string>
}

/** As deep as inlines may go: deeper is a loop. */
const maxDepth = 128
/** PATH_MAX of Linux: what is longer is no file name. */
const maxPathChars = 4_096
/** `A=$B$B`, `B=$C$C`, … doubles at each level. */
const maxSteps = 10_000

interface Run {
  readonly variables: Variables
  readonly unknown: Set<string>
  steps: number
  wrong: string | undefined
}

/** Offset of the `}` that closes the `${` at `from`, or -1. */
const closing = (text: string, from: number): number => {
  let open = 0
  for (let i = from; i < text.length; i++) {
    if (text.startsWith("${", i)) open++
    else if (text[i] === "}" && --open === 0) return i
  }
  return -1
}

interface Reference {
  readonly name: string
  readonly fallback: string | undefined
  readonly end: number
}

/** The reference at `from`; undefined = only a dollar, a text = what is wrong with it. */
const reference = (text: string, from: number): Reference | string | undefined => {
  if (text[from + 1] !== "{") {
    const plain = /^[A-Za-z_][A-Za-z0-9_]*/.exec(text.slice(from + 1, from + 1 + maxPathChars))
    return plain === null
      ? undefined
      : { name: plain[0], fallback: undefined, end: from + 1 + plain[0].length }
  }
  const end = closing(text, from)
  if (end === -1) return "'${' without its '}'"
  const braced = /^([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?$/.exec(text.slice(from + 2, end))
  if (braced === null) return `'${text.slice(from, end + 1)}' is not \${NAME} or \${NAME:-default}`
  return { name: braced[1]!, fallback: braced[2], end: end + 1 }
}

const substitute = (run: Run, found: Reference, written: string, depth: number): string => {
  const path = run.variables.paths.get(found.name.toUpperCase())
  if (path !== undefined) return expandAll(run, path, depth + 1)
  const { environment } = run.variables
  if (Object.hasOwn(environment, found.name)) return environment[found.name]!
  if (found.fallback !== undefined) return expandAll(run, found.fallback, depth + 1)
  run.unknown.add(found.name)
  return written
}

const expandAll = (run: Run, text: string, depth: number): string => {
  if (depth > maxDepth || ++run.steps > maxSteps) {
    run.wrong ??= "its variables refer to each other without end"
  }
  let out = ""
  let from = 0
  while (run.wrong === undefined) {
    const dollar = text.indexOf("$", from)
    if (dollar === -1) break
    const found = reference(text, dollar)
    const end = typeof found === "object" ? found.end : dollar + 1
    const written = text.slice(dollar, end)
    if (typeof found === "string") run.wrong = found
    out += text.slice(from, dollar)
    out += typeof found === "object" ? substitute(run, found, written, depth) : written
    if (out.length > maxPathChars) run.wrong ??= `it is longer than ${maxPathChars} characters`
    from = end
  }
  return out + text.slice(from)
}

/** Puts values in for variables: `[PATHS]`, else the environment, else the default written. */
export const expand = (text: string, variables: Variables): Result.Result<Expanded, string> => {
  const run: Run = { variables, unknown: new Set(), steps: 0, wrong: undefined }
  const out = expandAll(run, text, 0)
  if (run.wrong !== undefined) return Result.fail(run.wrong)
  return Result.succeed({ text: out, unknown: Array.from(run.unknown) })
}

/** Every name that `text` may look up in the environment. */
export const names = (text: string): ReadonlyArray<string> =>
  Array.from(text.matchAll(/\$\{?([A-Za-z_][A-Za-z0-9_]*)/g), (match) => match[1]!)
