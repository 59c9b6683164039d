// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The wiring: sections and where each may send a message, checked as a whole at start. Pure.
 *
 * A section is decoded with the options common to all stages and those of its program; then the
 * sections are looked at as a graph whose edges are NEXT, FAILURE and the targets of the program.
 */
import type * as Duration from "effect/Duration"
import * as Config from "../config/Config.ts"
import * as Decode from "../config/Decode.ts"
import * as Ini from "../config/Ini.ts"
import * as Nearest from "../config/Nearest.ts"
import type * as Option from "../config/Option.ts"
import type { Load, Settings, Stage } from "./Stage.ts"

/** Where in the configuration something was written. */
export type Origin = Ini.Origin

/** One way out of a section. */
export type Target = Decode.Target

/** A `[stage-NAME]` section, decoded. */
export interface Section {
  readonly name: string
  readonly origin: Origin
  readonly stage: Stage
  readonly settings: Settings
  /** The stage's load level under these settings. */
  readonly load: Load
  readonly next: string | undefined
  readonly failure: string | undefined
  /** Worker processes at most. */
  readonly parallelism: number
  /** Messages handed to one worker at a time; it runs so many at once. */
  readonly queueLimit: number
  readonly fusion: boolean
  /** Wall time of one message in one stage; then its worker is killed. */
  readonly timeout: Duration.Duration
  /** Settles wait for the disk. */
  readonly synchronousCommit: boolean
  readonly user: string
  readonly dbRole: string
  readonly targets: ReadonlyArray<Target>
}

/** All sections, and where mail enters. */
export interface Pipeline {
  readonly sections: ReadonlyMap<string, Section>
  /** Sections that mail enters from outside the pipeline: the first is the head. */
  readonly entries: ReadonlyArray<string>
  /** Names one reading of the configuration: workers of another generation are drained. */
  readonly generation: string
}

/** The stages there are, and those of them that the sections name. */
export interface Programs {
  readonly names: ReadonlyArray<string>
  readonly found: ReadonlyMap<string, Stage>
}

/** Values of other sections that the stage sections follow. */
export interface Defaults {
  readonly allowFusion: boolean
  readonly synchronousCommit: boolean
}

/** What is wrong and what is odd, and every value with its origin. */
export interface Findings {
  readonly problems: ReadonlyArray<Ini.Problem>
  readonly warnings: ReadonlyArray<string>
  readonly diagnostics: ReadonlyArray<Decode.Diagnostic>
}

/** The wiring; it may be used if there are no problems. */
export interface Wiring extends Findings {
  readonly sections: ReadonlyArray<Section>
}

const prefix = "stage-"

const stageSections = (source: Decode.Source): ReadonlyArray<Ini.Section> =>
  source.sections.filter(({ name }) => name.startsWith(prefix))

/** The programs that sections name. */
export const programs = (sections: Ini.Document): ReadonlyArray<string> =>
  sections
    .filter(({ name }) => name.startsWith(prefix))
    .flatMap(({ options }) =>
      options.filter(({ option }) => option === "PROGRAM").map(({ value }) => value)
    )

/** Decodes and checks all stage sections. */
export const wire = (
  source: Decode.Source,
  {
    defaults,
    entries,
    programs: known
  }: {
    readonly programs: Programs
    readonly defaults: Defaults
    readonly entries: ReadonlyArray<Decode.Entry>
  }
): Wiring => {
  const written = stageSections(source)
  const decoded = written.map((section) => decodeSection(source, section, { known, defaults }))
  const sections = decoded.flatMap(({ section }) => section ?? [])
  const names = written.map(({ name }) => name.slice(prefix.length))
  return {
    sections,
    problems: [
      ...written.flatMap(duplicates),
      ...decoded.flatMap(({ problems }) => problems),
      ...check(sections, names, entries)
    ],
    warnings: decoded.flatMap(({ warnings }) => warnings),
    diagnostics: decoded.flatMap(({ diagnostics }) => diagnostics)
  }
}

/** A section may be continued by another file, to change an option; twice in one file is a slip. */
const duplicates = ({ headers, name }: Ini.Section): ReadonlyArray<Ini.Problem> =>
  headers.flatMap((origin, i) => {
    const before = headers.slice(0, i).find(({ file }) => file === origin.file)
    if (before === undefined) return []
    return { origin, text: `[${name}] is there already, at ${Ini.at(before)}` }
  })

interface DecodedSection extends Findings {
  readonly section: Section | undefined
}

const decodeSection = (
  source: Decode.Source,
  section: Ini.Section,
  { defaults, known }: { readonly known: Programs; readonly defaults: Defaults }
): DecodedSection => {
  const around = Decode.surroundings(source)
  const common = Config.stage(source.cpus)
  const program = section.options.find(({ option }) => option === "PROGRAM")
  const stage = known.found.get(program?.value ?? "")
  if (stage === undefined) {
    // Nothing is known of the options that are the program's own.
    const options = section.options.filter(({ option }) => Object.hasOwn(common, option))
    const { problems, ...rest } = Decode.decode({ ...section, options }, common, around)
    if (program === undefined) return { ...rest, problems, section: undefined }
    const meant = Nearest.suggestion(program.value, known.names)
    const text = `[${section.name}] PROGRAM: there is no stage '${program.value}'${meant}`
    const all = [{ origin: program.origin, text }, ...problems]
    return { ...rest, problems: all, section: undefined }
  }
  // A stage may declare a common option again, to give it another default.
  const options: Option.Options = { ...common, ...stage.settings }
  const decoded = Decode.decode(section, options, around)
  const { diagnostics, problems, values, warnings } = decoded
  const wrong =
    problems.length > 0
      ? problems
      : nextProblem(section, stage, values["NEXT"] as string | undefined)
  if (wrong.length > 0) return { diagnostics, warnings, problems: wrong, section: undefined }
  const made = toSection(section, stage, { decoded, defaults })
  const odd = oddFusion(section, made)
  return { diagnostics, problems: [], warnings: [...warnings, ...odd], section: made }
}

const toSection = (
  { headers, name }: Ini.Section,
  stage: Stage,
  {
    decoded,
    defaults
  }: {
    readonly decoded: Decode.Decoded<Option.Options>
    readonly defaults: Defaults
  }
): Section => {
  const settings = decoded.values
  // The cast is sound: a stage that declares one of these again keeps its kind.
  const common = settings as Option.Values<ReturnType<typeof Config.stage>>
  const inherits = common.SYNCHRONOUS_COMMIT === "inherit"
  return {
    name: name.slice(prefix.length),
    origin: headers[0],
    stage,
    settings,
    load: stage.loadFor(settings),
    next: common.NEXT,
    failure: common.FAILURE,
    parallelism: common.PARALLELISM,
    queueLimit: common.QUEUE_LIMIT,
    fusion: defaults.allowFusion && (common.FUSION ?? true),
    timeout: common.TIMEOUT,
    synchronousCommit: inherits ? defaults.synchronousCommit : common.SYNCHRONOUS_COMMIT === "yes",
    // All workers of this version run as the daemon's own user and role.
    user: "",
    dbRole: "",
    targets: decoded.targets
  }
}

/** FUSION = yes where it can have no effect. */
const oddFusion = (section: Ini.Section, { settings, stage }: Section): ReadonlyArray<string> => {
  const fusion = section.options.find(({ option }) => option === "FUSION")
  if (fusion === undefined || settings["FUSION"] !== true || stage.fusible) return []
  const text = `[${section.name}] FUSION: ${stage.name} never runs behind another stage`
  return [Ini.format({ origin: fusion.origin, text })]
}

const nextProblem = (
  section: Ini.Section,
  stage: Stage,
  next: string | undefined
): ReadonlyArray<Ini.Problem> => {
  if (stage.next === "required" && next === undefined) {
    const text = `[${section.name}] NEXT is missing; ${stage.name} hands mail on`
    return [{ origin: section.headers[0], text }]
  }
  if (stage.next === "none" && next !== undefined) {
    const origin = section.options.find(({ option }) => option === "NEXT")?.origin
    const text = `[${section.name}] NEXT: ${stage.name} hands nothing on`
    return [{ origin: origin ?? section.headers[0], text }]
  }
  return []
}

/**
 * What is wrong with the graph of `sections`. `names` are all sections written: one that could not
 * be decoded is still there to be named.
 */
export const check = (
  sections: ReadonlyArray<Section>,
  names: ReadonlyArray<string>,
  entries: ReadonlyArray<Decode.Entry>
): ReadonlyArray<Ini.Problem> => {
  const known = new Set(names)
  const lost = [
    ...entries.flatMap((target) => unknownTarget(target.from, target, names)),
    ...sections.flatMap(({ name, targets }) =>
      targets.flatMap((target) => unknownTarget(`${prefix}${name}`, target, names))
    )
  ]
  const graph = new Map(sections.map((section) => [section.name, section]))
  const problems = [...lost, ...endlessLoops(sections, graph)]
  // A fault above leaves holes in the graph, and every section behind a hole would be named too.
  if (lost.length > 0 || sections.length < known.size) return problems
  return [...problems, ...unreachable(sections, graph, entries), ...deadEnds(sections, graph)]
}

type Graph = ReadonlyMap<string, Section>

const unknownTarget = (
  from: string,
  { option, origin, section }: Target,
  names: ReadonlyArray<string>
): ReadonlyArray<Ini.Problem> => {
  if (names.includes(section)) return []
  const meant = Nearest.suggestion(section, names)
  const text = `[${from}] ${option}: there is no section [${prefix}${section}]${meant}`
  return [{ origin, text }]
}

/** All sections that can be reached from `from`, these included. */
const reach = (
  from: Iterable<string>,
  edges: (name: string) => Iterable<string>
): ReadonlySet<string> => {
  const seen = new Set(from)
  // A set is visited in the order of insertion, also what is added on the way.
  for (const name of seen) for (const next of edges(name)) seen.add(next)
  return seen
}

const unreachable = (
  sections: ReadonlyArray<Section>,
  graph: Graph,
  entries: ReadonlyArray<Decode.Entry>
): ReadonlyArray<Ini.Problem> => {
  const out = (name: string) => (graph.get(name)?.targets ?? []).map(({ section }) => section)
  const reached = reach(
    entries.map(({ section }) => section),
    out
  )
  return sections
    .filter(({ name }) => !reached.has(name))
    .map(({ name, origin }) => ({
      origin,
      text: `[${prefix}${name}] is reached by no mail; if it enters there, name it in [pepsi] ENTRIES`
    }))
}

/**
 * Whether mail can leave the queue in this section: it hands nothing on, and none of its own
 * options must name a section.
 */
const ends = ({ stage }: Section): boolean =>
  stage.next === "none" &&
  Object.values(stage.settings).every(
    (option) => option.targets === undefined || option.default !== undefined
  )

const deadEnds = (sections: ReadonlyArray<Section>, graph: Graph): ReadonlyArray<Ini.Problem> => {
  const into = new Map<string, Array<string>>(Array.from(graph.keys(), (name) => [name, []]))
  for (const { name, targets } of sections) {
    for (const target of targets) into.get(target.section)?.push(name)
  }
  const ways = (name: string) => into.get(name) ?? []
  const ending = reach(
    sections.filter(ends).map(({ name }) => name),
    ways
  )
  return sections
    .filter(({ name }) => !ending.has(name))
    .map(({ name, origin }) => ({
      origin,
      text: `[${prefix}${name}] is a dead end: no way leads on to a section that ends`
    }))
}

/**
 * Cycles in which no stage waits: mail in them would run round as fast as it can. Each section is
 * reported with one such cycle at most.
 */
const endlessLoops = (
  sections: ReadonlyArray<Section>,
  graph: Graph
): ReadonlyArray<Ini.Problem> => {
  const problems: Array<Ini.Problem> = []
  const reported = new Set<string>()
  const restless = (name: string): ReadonlyArray<Target> => {
    const section = graph.get(name)
    return section === undefined || section.stage.waits ? [] : section.targets
  }
  for (const { name } of sections) {
    const loop = reported.has(name) ? undefined : loopThrough(name, restless)
    if (loop === undefined) continue
    for (const member of loop.path) reported.add(member)
    const path = [...loop.path, name].join(" -> ")
    const text = `[${prefix}${loop.path.at(-1)}] ${loop.closing.option}: ${path} is an endless loop`
    problems.push({ origin: loop.closing.origin, text })
  }
  return problems
}

/** The shortest way from `start` back to it, found by breadth. */
const loopThrough = (
  start: string,
  out: (name: string) => ReadonlyArray<Target>
): { readonly path: ReadonlyArray<string>; readonly closing: Target } | undefined => {
  const from = new Map<string, string | undefined>([[start, undefined]])
  for (const [name] of from) {
    for (const target of out(name)) {
      if (target.section === start) return { path: pathTo(name, from), closing: target }
      if (!from.has(target.section)) from.set(target.section, name)
    }
  }
  return undefined
}

const pathTo = (
  end: string,
  from: ReadonlyMap<string, string | undefined>
): ReadonlyArray<string> => {
  const path: Array<string> = []
  for (let at: string | undefined = end; at !== undefined; at = from.get(at)) path.unshift(at)
  return path
}
