// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * An INI file and all that it inlines, as one list of lines. Touches the file system, reads only.
 */
import { basename, dirname, isAbsolute, join } from "node:path"
import * as Effect from "effect/Effect"
import * as FileSystem from "effect/FileSystem"
import type { PlatformError } from "effect/PlatformError"
import * as Ini from "../src/config/Ini.ts"

/** What was read; problems are complete only together with those of the sections. */
export interface Read {
  readonly items: ReadonlyArray<Ini.Item>
  readonly problems: ReadonlyArray<Ini.Problem>
  readonly warnings: ReadonlyArray<string>
}

/** Deeper nesting is a mistake (a loop is found before). */
const maxDepth = 128
/** Files that inline one another twice each would otherwise be read 2^128 times. */
const maxFiles = 1_000

/** One file on the way from the main file to where we are. */
interface Open {
  readonly file: string
  /** Its name without links: a file is itself under every name. */
  readonly real: string
}

/** A reading; items are added in the order in which the lines count. */
interface Reading {
  readonly files: FileSystem.FileSystem
  readonly items: Array<Ini.Item>
  readonly problems: Array<Ini.Problem>
  readonly warnings: Array<string>
  count: number
}

const reasonOf = ({ reason }: PlatformError): string =>
  reason._tag === "NotFound"
    ? "there is no such file"
    : reason._tag === "PermissionDenied"
      ? "permission denied"
      : reason.message

/** The text of a file and its permission bits, or why there is none. */
const slurp = Effect.fnUntraced(function* (files: FileSystem.FileSystem, file: string) {
  const info = yield* files.stat(file)
  if (info.type !== "File") return "is no regular file"
  if (Number(info.size) > Ini.maxFileBytes) return `is larger than ${Ini.maxFileBytes} octets`
  return { mode: info.mode, text: yield* files.readFileString(file) }
})

const problem = (reading: Reading, origin: Ini.Origin, text: string): void => {
  reading.problems.push({ origin, text })
}

const within = (chain: ReadonlyArray<Open>, file: string): string =>
  isAbsolute(file) ? file : join(dirname(chain.at(-1)!.file), file)

/** A file that is to be read whole, and where it was named. */
interface Wanted {
  readonly file: string
  readonly origin: Ini.Origin
  /** The files that are being read, the main one first. */
  readonly chain: ReadonlyArray<Open>
}

/** Reads a file, with what it inlines. */
const readInto = (reading: Reading, wanted: Wanted): Effect.Effect<void> =>
  readWhole(reading, wanted).pipe(
    Effect.catch((error) => Effect.succeed(reasonOf(error))),
    Effect.map((wrong) => {
      if (wrong === undefined) return
      const name = wanted.chain.length === 0 ? "" : `${wanted.file}: `
      problem(reading, wanted.origin, `${name}${wrong}`)
    })
  )

/** Gives what is wrong with the file as a whole. */
const readWhole = Effect.fnUntraced(function* (reading: Reading, { chain, file }: Wanted) {
  const real = yield* reading.files.realPath(file)
  const loop = chain.some((one) => one.real === real)
  if (loop) return `a loop: it inlines ${chain.at(-1)!.file} itself`
  if (chain.length >= maxDepth) return `more than ${maxDepth} files deep`
  if (++reading.count > maxFiles) return `more than ${maxFiles} files in all`
  const found = yield* slurp(reading.files, file)
  if (typeof found === "string") return found
  const parsed = Ini.parse(file, found.text)
  reading.problems.push(...parsed.problems)
  for (const item of parsed.items) yield* follow(reading, [...chain, { file, real }], item)
  return undefined
})

/** Takes an item, or what a directive stands for. */
const follow = (
  reading: Reading,
  chain: ReadonlyArray<Open>,
  item: Ini.Item
): Effect.Effect<void> => {
  switch (item._tag) {
    case "Inline":
      return readInto(reading, { chain, file: within(chain, item.file), origin: item.origin })
    case "InlineMatching":
      return readMatching(reading, chain, item)
    case "InlineSecret":
      return readSecret(reading, within(chain, item.file), item)
    default:
      return Effect.sync(() => void reading.items.push(item))
  }
}

/** All files that match, in the order of their names; none is no fault. */
const readMatching = Effect.fnUntraced(function* (
  reading: Reading,
  chain: ReadonlyArray<Open>,
  item: Extract<Ini.Item, { readonly _tag: "InlineMatching" }>
) {
  const pattern = within(chain, item.pattern)
  const directory = dirname(pattern)
  // Only the last part may have wildcards, as in GNUnet: no walk through the whole disk.
  const matches = yield* reading.files.glob(basename(pattern), { root: directory }).pipe(
    Effect.catch((error) =>
      Effect.sync((): ReadonlyArray<string> => {
        if (error.reason._tag !== "NotFound") problem(reading, item.origin, reasonOf(error))
        return []
      })
    )
  )
  for (const name of matches.toSorted()) {
    yield* readInto(reading, { chain, file: join(directory, name), origin: item.origin })
  }
})

/** Permission bits that let anybody but the owner read. */
const readableByOthers = 0o044

/**
 * One section of a file of secrets. That we may not read it is no error: processes of other users
 * share the configuration, and what needs a secret says so itself.
 */
const readSecret = (
  reading: Reading,
  file: string,
  { origin, section }: Extract<Ini.Item, { readonly _tag: "InlineSecret" }>
): Effect.Effect<void> =>
  Effect.gen(function* () {
    const found = yield* slurp(reading.files, file)
    if (typeof found === "string") return problem(reading, origin, `${file}: ${found}`)
    if ((found.mode & readableByOthers) !== 0) {
      return problem(reading, origin, `${file}: group or others may read these secrets; chmod 600`)
    }
    const parsed = Ini.parse(file, found.text)
    reading.problems.push(...parsed.problems)
    for (const item of parsed.items) {
      if (item._tag === "Assignment" && item.section === section) {
        reading.items.push({ ...item, secret: true })
      } else if (item._tag === "Header" && item.section === section) {
        reading.items.push(item)
      } else if (item._tag.startsWith("Inline")) {
        problem(reading, item.origin, "a file of secrets inlines nothing")
      }
    }
  }).pipe(
    Effect.catch((error) =>
      Effect.sync(() => {
        const text = `${file}: ${reasonOf(error)}; [${section}] goes without it`
        reading.warnings.push(Ini.format({ origin, text }))
      })
    )
  )

/** Reads a file, absolute, with all that it inlines. What cannot be read is among the problems. */
export const read = Effect.fnUntraced(function* (file: string) {
  const files = yield* FileSystem.FileSystem
  const reading: Reading = { files, items: [], problems: [], warnings: [], count: 0 }
  yield* readInto(reading, { chain: [], file, origin: { file, line: 0 } })
  if (Ini.assemble(reading.items).length > Ini.maxSections) {
    problem(reading, { file, line: 0 }, `has more than ${Ini.maxSections} sections`)
  }
  return reading satisfies Read as Read
})
