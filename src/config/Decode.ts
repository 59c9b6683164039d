// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * From the sections of a text to values, with every fault of every section found at once. Pure.
 */
import { createHash } from "node:crypto"
import * as Result from "effect/Result"
import * as Schema from "effect/Schema"
import * as Config from "./Config.ts"
import * as Ini from "./Ini.ts"
import * as Nearest from "./Nearest.ts"
import type * as Option from "./Option.ts"

/**
 * All that the configuration is made from. It is handed to worker processes, which read no file
 * and no environment and so cannot see another configuration than the daemon does.
 */
export const Source = Schema.Struct({
  /** The main file, or what stands for it in messages. */
  main: Schema.String,
  /** Directory that relative file names begin in, absolute. */
  base: Schema.String,
  /** No file was given and none was found. */
  builtIn: Schema.Boolean,
  cpus: Schema.Int,
  /** The part of the environment that file names may refer to. */
  environment: Schema.Record(Schema.String, Schema.String),
  /** What was found while the files were read. */
  warnings: Schema.Array(Schema.String),
  sections: Schema.Array(Ini.Section)
})
export type Source = typeof Source.Type

/** One way that a section's options lead to another section. */
export interface Target {
  readonly option: string
  /** Name without `stage-`. */
  readonly section: string
  readonly origin: Ini.Origin
}

/** A section that mail enters, and the section that says so. */
export interface Entry extends Target {
  readonly from: string
}

/** One value as an operator sees it; a secret's texts are empty. */
export interface Diagnostic {
  readonly section: string
  readonly option: string
  /** As it stands in the file, or as the default is declared. */
  readonly written: string
  /** File names expanded. */
  readonly value: string
  /** undefined = by default. */
  readonly origin: Ini.Origin | undefined
  readonly secret: boolean
}

/** What became of a section. `values` is whole only if there are no problems. */
export interface Decoded<O extends Option.Options> {
  readonly values: Option.Values<O>
  readonly problems: ReadonlyArray<Ini.Problem>
  readonly warnings: ReadonlyArray<string>
  readonly diagnostics: ReadonlyArray<Diagnostic>
  readonly targets: ReadonlyArray<Target>
}

/** What decoding looks at besides the section itself. */
export interface Surroundings extends Ini.Variables {
  readonly base: string
}

/** `[PATHS]` and the environment of a source. */
export const surroundings = (source: Source): Surroundings => {
  const paths = source.sections.find(({ name }) => name === "paths")?.options ?? []
  return {
    base: source.base,
    environment: source.environment,
    paths: new Map(paths.map(({ option, value }) => [option, value]))
  }
}

/** An assignment with the option it is for. */
interface Written {
  readonly key: string
  readonly number: number
  readonly assignment: Ini.Assignment
}

/** The option that an assignment is for: of that name, or `NAME_1` of a numbered one. */
const owner = (options: Option.Options, name: string): Omit<Written, "assignment"> | undefined => {
  if (Object.hasOwn(options, name)) {
    return options[name]!.numbered === undefined ? { key: name, number: 0 } : undefined
  }
  const [, key = "", digits] = /^(.+)_([1-9]\d{0,5})$/.exec(name) ?? []
  const most = Object.hasOwn(options, key) ? (options[key]!.numbered ?? 0) : 0
  return Number(digits) <= most ? { key, number: Number(digits) } : undefined
}

/** Names as they are written, for suggestions. */
const spellings = (options: Option.Options): ReadonlyArray<string> =>
  Object.entries(options).map(([key, { numbered }]) => (numbered === undefined ? key : `${key}_1`))

/** A section being decoded. */
interface Work {
  readonly section: string
  readonly surroundings: Surroundings
  readonly problems: Array<Ini.Problem>
  readonly warnings: Array<string>
  readonly diagnostics: Array<Diagnostic>
  readonly targets: Array<Target>
}

/** A text that stands for an option: written, or its default. */
interface Text {
  readonly option: string
  readonly text: string
  readonly origin: Ini.Origin
  readonly assigned: boolean
  readonly secret: boolean
}

const absolute = (base: string, file: string): string =>
  file === "" || file.startsWith("/") ? file : `${base}/${file.replace(/^(\.\/)+/, "")}`

/** The file name that a text stands for. */
const fileName = (work: Work, { option, origin, text }: Text): Result.Result<string, string> => {
  return Result.map(Ini.expand(text, work.surroundings), (expanded) => {
    for (const name of expanded.unknown) {
      const note = `[${work.section}] ${option}: $${name} is not set and stays as it is`
      work.warnings.push(Ini.format({ origin, text: note }))
    }
    return absolute(work.surroundings.base, expanded.text)
  })
}

const plain = (text: string): Result.Result<string, string> =>
  Ini.hasControl(text) ? Result.fail("it holds a control character") : Result.succeed(text)

const readOne = <A>(work: Work, option: Option.Option<A>, given: Text): A | undefined => {
  const secret = given.secret || option.secret === true
  const effective = option.file === true ? fileName(work, given) : Result.succeed(given.text)
  work.diagnostics.push({
    section: work.section,
    option: given.option,
    written: secret ? "" : given.text,
    value: secret ? "" : Result.getOrElse(effective, () => given.text),
    origin: given.assigned ? given.origin : undefined,
    secret
  })
  const read = effective.pipe(Result.flatMap(plain), Result.flatMap(option.read))
  if (Result.isFailure(read)) {
    const shown = secret ? "the value" : `'${given.text}'`
    const why = read.failure === "" ? "" : `: ${read.failure}`
    const text = `${shown} is not ${option.type}${why}; example '${option.example}'`
    work.problems.push({ origin: given.origin, text: `[${work.section}] ${given.option}: ${text}` })
    return undefined
  }
  for (const section of option.targets?.(read.success as never) ?? []) {
    work.targets.push({ option: given.option, section, origin: given.origin })
  }
  return read.success
}

/** The value of an option from all that is written for it. */
const value = (
  work: Work,
  [key, option]: [string, Option.Option<unknown>],
  found: Found
): unknown => {
  const texts = found.written
    .filter((one) => one.key === key)
    .map(
      ({ assignment }): Text => ({
        option: assignment.option,
        text: assignment.value,
        origin: assignment.origin,
        assigned: true,
        secret: assignment.secret
      })
    )
  if (option.numbered !== undefined) {
    return texts.flatMap((text) => (readOne(work, option, text) ?? []) as ReadonlyArray<unknown>)
  }
  if (texts[0] !== undefined) return readOne(work, option, texts[0])
  const { origin } = found
  if (option.default !== undefined) {
    const byDefault = { option: key, text: option.default, origin, assigned: false, secret: false }
    return readOne(work, option, byDefault)
  }
  const example = `${key} = ${option.example}`
  work.problems.push({ origin, text: `[${work.section}] ${key} is missing; example '${example}'` })
  return undefined
}

interface Found {
  readonly origin: Ini.Origin
  readonly written: ReadonlyArray<Written>
}

/** Assigns each line of the section to its option; what has none is a problem. */
const sort = (
  work: Work,
  section: Ini.Section,
  options: Option.Options
): ReadonlyArray<Written> => {
  const written: Array<Written> = []
  for (const assignment of section.options) {
    const found = owner(options, assignment.option)
    if (found !== undefined) {
      written.push({ ...found, assignment })
      continue
    }
    const text = `[${section.name}] ${assignment.option} is no option here${Nearest.suggestion(
      assignment.option,
      spellings(options)
    )}`
    work.problems.push({ origin: assignment.origin, text })
  }
  return written.toSorted((a, b) => a.number - b.number)
}

/** Decodes a section; `section.options` is empty where the file has no such section. */
export const decode = <O extends Option.Options>(
  section: Ini.Section,
  options: O,
  surroundings: Surroundings
): Decoded<O> => {
  const work: Work = {
    section: section.name,
    surroundings,
    problems: [],
    warnings: [],
    diagnostics: [],
    targets: []
  }
  const found = { origin: section.headers[0], written: sort(work, section, options) }
  const values = Object.fromEntries(
    Object.entries(options).map((entry) => [entry[0], value(work, entry, found)])
  )
  // The cast is sound where there are no problems: each option was read by its own reader.
  return { ...work, values: values as Option.Values<O> }
}

/** The section of that name, or an empty one that stands for it. */
export const find = (source: Source, name: string): Ini.Section =>
  source.sections.find((section) => section.name === name) ?? {
    name,
    headers: [{ file: source.main, line: 0 }],
    options: []
  }

/** Names one reading: equal if and only if every effective text is equal. */
export const generation = (source: Source): string => {
  const sections = source.sections.map(({ name, options }) => [
    name,
    options.map((one) => [one.option, one.value]).toSorted()
  ])
  const environment = Object.entries(source.environment).toSorted()
  const effective = JSON.stringify([sections.toSorted(), environment, source.base, source.cpus])
  return createHash("sha256").update(effective).digest("hex").slice(0, 16)
}

/** The environment variables that the file names of a source can refer to. */
export const environmentNames = (
  sections: Ini.Document,
  options: Iterable<Option.Options>
): ReadonlyArray<string> => {
  const texts = sections.flatMap((section) => section.options.map((one) => one.value))
  for (const some of options) {
    for (const { default: text, file } of Object.values(some)) {
      if (file === true && text !== undefined) texts.push(text)
    }
  }
  return Array.from(new Set(texts.flatMap(Ini.names)))
}

/** The sections that are no stages, decoded. */
export interface Decisions {
  readonly pepsi: Config.Pepsi
  readonly postgres: Config.Postgres
  readonly ingress: Config.Ingress
  readonly dispatch: Config.Dispatch
  readonly problems: ReadonlyArray<Ini.Problem>
  readonly warnings: ReadonlyArray<string>
  readonly diagnostics: ReadonlyArray<Diagnostic>
  /** Where mail comes in; the first is the head. */
  readonly entries: ReadonlyArray<Entry>
}

/** All sections that are no stages. */
export const decisions = (source: Source): Decisions => {
  const around = surroundings(source)
  const one = <O extends Option.Options>(name: string, options: O): Decoded<O> =>
    decode(find(source, name), options, around)
  const pepsi = one("pepsi", Config.pepsi)
  const postgres = one("pepsi-postgres", Config.postgres)
  const ingress = one("pepsi-ingress", Config.ingress)
  const dispatch = one("pepsi-dispatch", Config.dispatch)
  const later = [one("pepsi-httpd", Config.httpd), one("pepsi-telemetry", Config.telemetry)]
  const all = [pepsi, postgres, ingress, dispatch, ...later]
  const wrong = all.flatMap((section) => section.problems)
  return {
    pepsi: pepsi.values,
    postgres: postgres.values,
    ingress: ingress.values,
    dispatch: dispatch.values,
    // Comparing values that could not be read would only repeat the fault.
    problems: wrong.length > 0 ? wrong : contradictions(source, ingress.values, dispatch.values),
    warnings: [...notices(source), ...all.flatMap((section) => section.warnings)],
    diagnostics: [...pathDiagnostics(source), ...all.flatMap((section) => section.diagnostics)],
    entries: [
      ...ingress.targets.map((target) => ({ ...target, from: "pepsi-ingress" })),
      ...pepsi.targets.map((target) => ({ ...target, from: "pepsi" }))
    ]
  }
}

const pathDiagnostics = (source: Source): ReadonlyArray<Diagnostic> =>
  find(source, "paths").options.map(({ option, origin, secret, value }) => {
    const shown = secret ? "" : value
    return { section: "paths", option, written: shown, value: shown, origin, secret }
  })

/** Where a value stands; if it is a default, where its section begins. */
const origin = (source: Source, section: string, option: string): Ini.Origin => {
  const { headers, options } = find(source, section)
  return options.find((one) => one.option === option)?.origin ?? headers[0]
}

/** Values that are right alone and wrong together. */
const contradictions = (
  source: Source,
  ingress: Config.Ingress,
  dispatch: Config.Dispatch
): ReadonlyArray<Ini.Problem> => {
  const problems: Array<Ini.Problem> = []
  const unless = (holds: boolean, section: string, option: string, text: string) => {
    const where = origin(source, section, option)
    if (!holds) problems.push({ origin: where, text: `[${section}] ${option} ${text}` })
  }
  const limit = ingress.MESSAGE_SIZE_LIMIT
  unless(
    limit <= ingress.MEMORY_BUDGET,
    "pepsi-ingress",
    "MEMORY_BUDGET",
    "is less than MESSAGE_SIZE_LIMIT: the largest message allowed could never be received"
  )
  unless(
    limit <= dispatch.MAX_INFLIGHT,
    "pepsi-dispatch",
    "MAX_INFLIGHT",
    "is less than MESSAGE_SIZE_LIMIT: the largest message allowed would never be handed out"
  )
  unless(
    dispatch.BATCH <= dispatch.MAX_INFLIGHT,
    "pepsi-dispatch",
    "BATCH",
    "is more than MAX_INFLIGHT"
  )
  const { TLS_CERT: certificate, TLS_KEY: key } = ingress
  const alone = certificate === undefined ? "TLS_KEY" : "TLS_CERT"
  unless(
    (certificate === undefined) === (key === undefined),
    "pepsi-ingress",
    alone,
    "stands alone: TLS_CERT and TLS_KEY are written both or neither"
  )
  return problems
}

/** Sections nobody reads, and trial values that nobody chose. */
const notices = (source: Source): ReadonlyArray<string> => {
  const known = Object.keys(Config.sections)
  const unknown = source.sections.filter(
    ({ name }) => !/^(stage-.*|x-.*|paths)$/.test(name) && !known.includes(name)
  )
  const notes = unknown.map(({ headers, name }) => {
    const meant = Nearest.suggestion(name, known)
    return Ini.format({ origin: headers[0], text: `[${name}] is unknown and ignored${meant}` })
  })
  const pepsi = find(source, "pepsi")
  const unchosen = Config.trial.filter((key) => !pepsi.options.some((one) => one.option === key))
  if (source.builtIn || unchosen.length === 0) return notes
  const text = `[pepsi] ${unchosen.join(", ")}: not written, so a value for trials is used`
  return [...notes, Ini.format({ origin: pepsi.headers[0], text })]
}
