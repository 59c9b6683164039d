// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Where the embedded cluster lies and who runs it.
 *
 * PostgreSQL refuses to run as root, so root gives it an unprivileged account; that account must
 * be able to reach its files, and a socket's name has little room. So there are up to three
 * places, and links in the state directory lead to all of them:
 *
 * DIR/postgres   the data, or a link to it below /var/lib/pepsi when DIR cannot be entered
 * DIR/run        the directory of the socket, or a link to a short one
 * DIR/postgres.log
 *
 * Touches those and nothing else.
 */
import * as Effect from "effect/Effect"
import { createHash } from "node:crypto"
import * as fs from "node:fs"
import * as os from "node:os"
import * as path from "node:path"
import { getgid, getuid } from "node:process"
import { EmbeddedPostgresError } from "../src/services/DatabaseError.ts"
import * as Directories from "./Directories.ts"
import { type Binaries, isLinked } from "./PostgresBinaries.ts"

/** Who runs the server. */
export interface Account {
  readonly uid: number
  readonly gid: number
}

export interface Place {
  /** The state directory, absolute. */
  readonly directory: string
  /** What holds `data` and `run`: the state directory itself where it can be entered. */
  readonly base: string
  readonly data: string
  readonly run: string
  readonly log: string
  readonly account: Account
}

/** The same account as ours needs no change of ids. */
export const isOurs = (account: Account): boolean => account.uid === getuid?.()

/** Root's choice: `postgres` if the host has it, else `nobody`; anyone else runs it himself. */
const chooseAccount = (): Account | undefined => {
  const ours = { uid: getuid?.() ?? 0, gid: getgid?.() ?? 0 }
  if (ours.uid !== 0) return ours
  const entries = fs
    .readFileSync("/etc/passwd", "utf8")
    .split("\n")
    .map((line) => line.split(":"))
  const named = (wanted: string) => entries.find(([name]) => name === wanted)
  const entry = named("postgres") ?? named("nobody")
  return entry === undefined ? undefined : { uid: Number(entry[2]), gid: Number(entry[3]) }
}

/** Whether `account` may pass through a directory of this mode; access lists are not looked at. */
export const mayEnter = (
  directory: { readonly mode: number; readonly uid: number; readonly gid: number },
  account: Account
): boolean => {
  const shift = account.uid === directory.uid ? 6 : account.gid === directory.gid ? 3 : 0
  return account.uid === 0 || ((directory.mode >> shift) & 1) === 1
}

/** Whether `account` can come to `directory` and what is in it. */
const canReach = (directory: string, account: Account): boolean => {
  const here = fs.realpathSync(directory)
  const parent = path.dirname(here)
  return mayEnter(fs.statSync(here), account) && (parent === here || canReach(parent, account))
}

/** Where state goes that cannot lie in the state directory (Filesystem Hierarchy Standard 5.8). */
const elsewhere = "/var/lib/pepsi"

const lstat = (file: string): fs.Stats | undefined => fs.lstatSync(file, { throwIfNoEntry: false })

/** Makes `link` lead to `target`, whatever it led to. */
const relink = (target: string, link: string): void => {
  const stats = lstat(link)
  if (stats?.isSymbolicLink() === true) fs.unlinkSync(link)
  fs.symlinkSync(target, link)
}

/**
 * Exists afterwards and belongs to `account`. Nobody else may look into it; members of `group` may
 * pass through it, which is all that a socket needs whose name they know.
 */
const privateDirectory = (directory: string, account: Account, group?: number): void => {
  Directories.make(directory, 0o700)
  const isForeign = group !== undefined || !isOurs(account)
  if (isForeign) fs.chownSync(directory, account.uid, group ?? account.gid)
  fs.chmodSync(directory, group === undefined ? 0o700 : 0o710)
}

const baseOf = (directory: string, account: Account): string => {
  const data = path.join(directory, "postgres")
  // A link made earlier is the memory of the choice; one that leads nowhere is lost mail.
  if (lstat(data)?.isSymbolicLink() === true) return path.dirname(fs.realpathSync(data))
  if (lstat(data) !== undefined || canReach(directory, account)) return directory
  const name = createHash("sha256").update(directory).digest("hex").slice(0, 16)
  const base = path.join(elsewhere, name)
  Directories.make(base, 0o711)
  return base
}

/** `sun_path` has 104 octets on the BSDs and 108 on Linux, the last one NUL; the name takes 14. */
const maxRunOctets = 104 - 1 - "/.s.PGSQL.5432".length

const runOf = (base: string, account: Account, group: number | undefined): string => {
  const run = path.join(base, "run")
  if (Buffer.byteLength(run) <= maxRunOctets) {
    privateDirectory(run, account, group)
    return run
  }
  const before = lstat(run)?.isSymbolicLink() === true ? fs.readlinkSync(run) : undefined
  const stats = before === undefined ? undefined : lstat(before)
  // A directory of somebody else under our old name would let him stand in for the server.
  if (before !== undefined && stats?.isDirectory() && stats.uid === account.uid) {
    privateDirectory(before, account, group)
    return before
  }
  const near = Buffer.byteLength(os.tmpdir()) < 60 ? os.tmpdir() : "/tmp"
  const short = fs.mkdtempSync(path.join(near, "pepsi-"))
  privateDirectory(short, account, group)
  relink(short, run)
  return short
}

const unusable =
  (directory: string) =>
  (cause: unknown): EmbeddedPostgresError => {
    const why = cause instanceof Error ? cause.message : String(cause)
    return new EmbeddedPostgresError({
      reason: "directory",
      detail: `the database cannot be kept in ${directory}: ${why}`,
      cause
    })
  }

/**
 * Makes the directories and gives where they are. Repeating it finds the same place. Members of
 * `group` may use the socket beside the server's own account.
 */
export const prepare = (
  stateDirectory: string,
  group?: number
): Effect.Effect<Place, EmbeddedPostgresError> =>
  Effect.try({
    try: () => {
      // 0711: the database's account may pass through, nobody else can list it.
      Directories.make(stateDirectory, 0o711)
      const directory = fs.realpathSync(stateDirectory)
      const account = chooseAccount()
      if (account === undefined) throw new Error("root has no account postgres or nobody to run it")
      fs.accessSync(directory, fs.constants.W_OK | fs.constants.X_OK)
      const base = baseOf(directory, account)
      const run = runOf(base, account, group)
      if (base !== directory) relink(run, path.join(directory, "run"))
      return {
        directory,
        base,
        run,
        account,
        data: path.join(base, "postgres"),
        log: path.join(directory, "postgres.log")
      }
    },
    catch: unusable(stateDirectory)
  })

/**
 * Makes room for a new cluster under a passing name, lets `fill` make it there, and gives it its
 * own name only when it is whole.
 */
export const install = <E, R>(
  place: Place,
  fill: (directory: string) => Effect.Effect<void, E, R>
): Effect.Effect<void, E | EmbeddedPostgresError, R> => {
  const passing = `${place.data}.new`
  const step = (run: () => void) => Effect.try({ try: run, catch: unusable(place.base) })
  return step(() => {
    fs.rmSync(passing, { recursive: true, force: true })
    privateDirectory(passing, place.account)
  }).pipe(
    Effect.andThen(fill(passing)),
    Effect.andThen(
      step(() => {
        fs.renameSync(passing, place.data)
        if (place.base !== place.directory)
          relink(place.data, path.join(place.directory, "postgres"))
      })
    )
  )
}

/**
 * Binaries that `place.account` can run: those found, or a copy of the npm package beside the data
 * when the account cannot reach it or its libraries are not linked.
 */
export const reachable = (
  place: Place,
  binaries: Binaries
): Effect.Effect<Binaries, EmbeddedPostgresError> =>
  Effect.try({
    try: () => {
      if (binaries.origin === "host") return binaries
      const isReachable = canReach(path.join(binaries.root, "bin"), place.account)
      if (isReachable && isLinked(binaries)) return binaries
      const root = path.join(place.base, `postgresql-${binaries.version}`)
      if (!fs.existsSync(root)) copyBinaries(binaries, root)
      return { ...binaries, root }
    },
    catch: unusable(place.base)
  })

/** About 60 MB; appears under its name only when it is whole. */
const copyBinaries = (binaries: Binaries, root: string): void => {
  const passing = `${root}.new`
  fs.rmSync(passing, { recursive: true, force: true })
  fs.cpSync(binaries.root, passing, { recursive: true, verbatimSymlinks: true })
  for (const { at, to } of binaries.links) {
    if (lstat(path.join(passing, at)) === undefined) fs.symlinkSync(to, path.join(passing, at))
  }
  fs.chmodSync(passing, 0o755)
  fs.renameSync(passing, root)
}
