// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The configuration from INI files, or from the text a daemon gives its workers.
 *
 * Touches the file system (reads only) and is the one place that reads the environment, the
 * working directory and the number of CPUs.
 */
import { availableParallelism } from "node:os"
import { dirname, resolve } from "node:path"
import * as ConfigProvider from "effect/ConfigProvider"
import * as Effect from "effect/Effect"
import * as FileSystem from "effect/FileSystem"
import * as Layer from "effect/Layer"
import * as Schema from "effect/Schema"
import * as Config from "../src/config/Config.ts"
import * as Decode from "../src/config/Decode.ts"
import * as Ini from "../src/config/Ini.ts"
import * as Profile from "../src/config/Profile.ts"
import * as Route from "../src/pipeline/Route.ts"
import type { Stage } from "../src/pipeline/Stage.ts"
import { Configuration, ConfigurationInvalid } from "../src/services/Configuration.ts"
import { Stages } from "../src/services/Stages.ts"
import * as IniFiles from "./IniFiles.ts"

/** A variable of the environment; one that is empty counts as not set. */
const variable = Effect.fnUntraced(function* (name: string) {
  const provider = yield* ConfigProvider.ConfigProvider
  const node = yield* Effect.orDie(provider.load([name])) // the environment cannot fail
  return node?.value
})

/** Where a file is looked for when none is given: the user's, then the host's. */
const candidates = Effect.gen(function* () {
  const xdg = yield* variable("XDG_CONFIG_HOME")
  const home = yield* variable("HOME")
  const user = xdg ?? (home === undefined ? undefined : `${home}/.config`)
  return [...(user === undefined ? [] : [`${user}/pepsi.conf`]), "/etc/pepsi/pepsi.conf"]
})

/** The file to read; undefined = the built-in profile. A file given must exist. */
const choose = Effect.fnUntraced(function* (given: string | undefined) {
  if (given !== undefined) return resolve(given)
  const files = yield* FileSystem.FileSystem
  for (const file of yield* candidates) {
    const there = yield* files.stat(file).pipe(
      Effect.as(true),
      // A file we may not see is meant, too: to pass it over would start a trial server instead.
      Effect.catch(({ reason }) => Effect.succeed(reason._tag === "PermissionDenied"))
    )
    if (there) return resolve(file)
  }
  return undefined
})

/** There is at least one problem. The same default may be wrong in several sections: said once. */
const invalid = (problems: ReadonlyArray<Ini.Problem>): ConfigurationInvalid => {
  const messages = Array.from(new Set(problems.map(Ini.format)))
  return new ConfigurationInvalid({ messages: messages as [string, ...Array<string>] })
}

/** The stages that sections name, and the names of all. */
const findPrograms = Effect.fnUntraced(function* (sections: Ini.Document) {
  const stages = yield* Stages
  const found = new Map<string, Stage>()
  for (const name of new Set(Route.programs(sections))) {
    const stage = yield* stages.find(name)
    if (stage !== undefined) found.set(name, stage)
  }
  return { names: stages.names, found }
})

/** The part of the environment that file names refer to. */
const environment = Effect.fnUntraced(function* (sections: Ini.Document, programs: Route.Programs) {
  const options = [
    ...Object.values(Config.sections),
    ...Array.from(programs.found.values(), ({ settings }) => settings)
  ]
  const values: Record<string, string> = { PEPSI_HOME: resolve("pepsi-data") }
  for (const name of Decode.environmentNames(sections, options)) {
    const value = yield* variable(name)
    if (value !== undefined) values[name] = name === "PEPSI_HOME" ? resolve(value) : value
  }
  return values
})

/** Decodes and checks everything; all errors come together. Pure. */
const assemble = (
  source: Decode.Source,
  programs: Route.Programs,
  found: ReadonlyArray<Ini.Problem>
): Effect.Effect<Configuration["Service"], ConfigurationInvalid> => {
  const decisions = Decode.decisions(source)
  const { dispatch, entries, ingress, pepsi, postgres } = decisions
  const defaults = {
    allowFusion: pepsi.ALLOW_FUSION,
    synchronousCommit: postgres.WORKER_SYNCHRONOUS_COMMIT
  }
  const wiring = Route.wire(source, { programs, defaults, entries })
  const problems = [...found, ...decisions.problems, ...wiring.problems]
  if (problems.length > 0) return Effect.fail(invalid(problems))
  const generation = Decode.generation(source)
  return Effect.succeed({
    pepsi,
    postgres,
    ingress,
    dispatch,
    pipeline: {
      sections: new Map(wiring.sections.map((section) => [section.name, section])),
      entries: Array.from(new Set(entries.map(({ section }) => section))),
      generation
    },
    generation,
    warnings: [...source.warnings, ...decisions.warnings, ...wiring.warnings],
    diagnostics: [...decisions.diagnostics, ...wiring.diagnostics],
    text: JSON.stringify(Schema.encodeSync(Decode.Source)(source))
  })
}

/** Reads the file given, or the one found in the usual places, or the built-in profile. */
export const load = Effect.fn("ConfigIni.load")(function* (given: string | undefined) {
  const file = yield* choose(given)
  const read =
    file === undefined
      ? { ...Ini.parse(Profile.name, Profile.text), warnings: [] }
      : yield* IniFiles.read(file)
  const sections = Ini.assemble(read.items)
  if (sections.length === 0 && read.problems.length > 0) return yield* invalid(read.problems)
  const programs = yield* findPrograms(sections)
  const source: Decode.Source = {
    main: file ?? Profile.name,
    base: file === undefined ? resolve(".") : dirname(file),
    builtIn: file === undefined,
    cpus: availableParallelism(),
    environment: yield* environment(sections, programs),
    warnings: read.warnings,
    sections
  }
  return yield* assemble(source, programs, read.problems)
})

const decodeText = Schema.decodeUnknownEffect(Schema.fromJsonString(Decode.Source))

/** Makes the Configuration again whose `text` this is. */
export const reload = Effect.fn("ConfigIni.reload")(function* (text: string) {
  const source = yield* decodeText(text).pipe(
    Effect.mapError(({ message }) =>
      invalid([{ origin: { file: "configuration handed over", line: 0 }, text: message }])
    )
  )
  return yield* assemble(source, yield* findPrograms(source.sections), [])
})

/** From `-c FILE`, or without one from where it is found. */
export const fromFile = (
  file: string | undefined
): Layer.Layer<Configuration, ConfigurationInvalid, FileSystem.FileSystem | Stages> =>
  Layer.effect(Configuration, load(file))

/** From the text of another process. */
export const fromText = (text: string): Layer.Layer<Configuration, ConfigurationInvalid, Stages> =>
  Layer.effect(Configuration, reload(text))
