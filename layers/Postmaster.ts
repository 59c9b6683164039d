// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * One PostgreSQL server process: made, started or adopted, and stopped.
 *
 * A postmaster outlives a daemon that was killed; the next one finds it by `postmaster.pid` and
 * takes it over. Touches the processes of its own data directory only.
 */
import * as PgConnection from "@effect/sql-pg/PgConnection"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Schedule from "effect/Schedule"
import { execFile, spawn } from "node:child_process"
import * as fs from "node:fs"
import * as path from "node:path"
import * as process from "node:process"
import { EmbeddedPostgresError } from "../src/services/DatabaseError.ts"
import type { Binaries } from "./PostgresBinaries.ts"
import { install, isOurs, type Place } from "./PostgresPlace.ts"

/** The superuser of the cluster; trusted, because only those who may enter `run` can ask. */
export const superuser = "pepsi"
export const port = 5432

/** A server process that we started or found. */
export interface Postmaster {
  readonly pid: number
  readonly adopted: boolean
  /** Returns when the process has ended. */
  readonly ended: Effect.Effect<void>
}

const failed = (detail: string, cause?: unknown): EmbeddedPostgresError =>
  new EmbeddedPostgresError({ reason: "start", detail, cause })

/** Nothing of our environment reaches the server: PGDATA, PGPORT and the like would mislead it. */
const environment = { LC_ALL: "C", PATH: "/usr/bin:/bin" }

const identity = (place: Place) =>
  isOurs(place.account) ? {} : { uid: place.account.uid, gid: place.account.gid }

/**
 * Makes an empty cluster. Locale C: the order of text then never changes with an update of libc,
 * which would silently break indexes, and only ASCII letters have case, as in mail domains.
 */
export const initialize = (
  place: Place,
  binaries: Binaries
): Effect.Effect<void, EmbeddedPostgresError> =>
  install(place, (directory) =>
    Effect.andThen(
      initdb(place, binaries, directory),
      Effect.sync(() => fs.appendFileSync(path.join(directory, "postgresql.conf"), include))
    )
  )

const include = `
# pepsi.conf is written anew at each start. Settings of your own go below this line.
include 'pepsi.conf'
`

const initdb = (place: Place, binaries: Binaries, directory: string) => {
  const options = [
    "-D",
    directory,
    "-U",
    superuser,
    "-E",
    "UTF8",
    "--locale=C",
    "--no-instructions",
    "--auth-local=trust",
    "--auth-host=reject"
  ]
  // Checksums, the default since 18, make every hint bit a write to the log.
  if (binaries.major >= 18) options.push("--no-data-checksums")
  return Effect.callback<void, EmbeddedPostgresError>((resume) => {
    const child = execFile(
      path.join(binaries.root, "bin", "initdb"),
      options,
      { ...identity(place), env: environment, cwd: "/" },
      (error, _, stderr) =>
        resume(
          error === null
            ? Effect.void
            : Effect.fail(failed(`initdb failed: ${stderr.trim()}`, error))
        )
    )
    return Effect.sync(() => child.kill("SIGTERM"))
  })
}

/**
 * The queue swings between empty and full, so it is vacuumed often. No statement, no parameter and
 * no detail of an error gets into the log: they would hold mail.
 */
const settings = `# Written by pepsi at each start.
max_connections = 100
shared_buffers = 128MB
max_wal_size = 2GB
autovacuum_naptime = 5s
jit = off
log_checkpoints = off
log_statement = none
log_min_duration_statement = -1
log_min_error_statement = panic
log_parameter_max_length = 0
log_parameter_max_length_on_error = 0
log_error_verbosity = terse
log_line_prefix = '%m [%p] '
logging_collector = off
log_destination = stderr
`

/** What `postmaster.pid` says: process, socket directory, port. */
interface PidFile {
  readonly pid: number
  readonly run: string
  readonly port: number
}

/** What the system calls files and processes that are not there, or not ours to see. */
const absent = new Set<string | undefined>(["ENOENT", "ESRCH", "EACCES"])

/** Servers come and go between any two questions, so it is asked once. undefined = not there. */
const ifThere = <A>(ask: () => A): A | undefined => {
  try {
    return ask()
  } catch (error) {
    if (absent.has((error as NodeJS.ErrnoException).code)) return undefined
    throw error
  }
}

/** undefined also while the server is still writing it. */
const readPidFile = (place: Place): PidFile | undefined => {
  const text = ifThere(() => fs.readFileSync(path.join(place.data, "postmaster.pid"), "utf8"))
  const [pid = "", , , socketPort = port, run = ""] = text?.split("\n") ?? []
  return pid === "" ? undefined : { pid: Number(pid), port: Number(socketPort), run }
}

/** Whether the process is there and, where the system tells, works in this data directory. */
const isPostmaster = (place: Place, pid: number): boolean => {
  if (!(pid > 1) || !isAlive(pid)) return false
  if (!fs.existsSync("/proc/self/cwd")) return true
  return ifThere(() => fs.realpathSync(`/proc/${pid}/cwd`)) === fs.realpathSync(place.data)
}

const isAlive = (pid: number): boolean =>
  Effect.runSync(
    Effect.match(
      Effect.try(() => process.kill(pid, 0)),
      {
        onSuccess: () => true,
        onFailure: ({ cause }) => (cause as NodeJS.ErrnoException).code === "EPERM"
      }
    )
  )

/** Asks the server which directory it serves. */
const answers = (place: Place, file: PidFile): Effect.Effect<boolean> =>
  Effect.scoped(
    Effect.gen(function* () {
      const session = yield* PgConnection.make({
        host: file.run,
        port: file.port,
        username: superuser,
        database: "postgres",
        applicationName: "pepsi start",
        connectTimeout: "5 seconds"
      })
      const rows = yield* session.queryValues("show data_directory", [], false)
      return fs.realpathSync(String(rows[0]?.[0])) === fs.realpathSync(place.data)
    })
  ).pipe(
    // It may still be recovering (57P03), or not have made its socket; whoever asks asks again.
    Effect.catchTag("SqlError", () => Effect.succeed(false))
  )

const adopt = (place: Place, pid: number): Postmaster => ({
  pid,
  adopted: true,
  // Not our child: the system does not tell us when it ends. 50 ms are 20 cheap calls a second.
  ended: Effect.sync(() => isPostmaster(place, pid)).pipe(
    Effect.repeat({ while: (there) => there, schedule: Schedule.spaced("50 millis") }),
    Effect.asVoid
  )
})

const launch = (
  place: Place,
  binaries: Binaries
): Effect.Effect<Postmaster, EmbeddedPostgresError> =>
  Effect.try({
    try: () => {
      fs.writeFileSync(path.join(place.data, "pepsi.conf"), settings, { mode: 0o644 })
      const log = fs.openSync(place.log, "a", 0o600)
      const child = spawn(
        path.join(binaries.root, "bin", "postgres"),
        ["-D", place.data, "-k", place.run, "-p", String(port), "-c", "listen_addresses="],
        {
          ...identity(place),
          env: environment,
          cwd: "/",
          // Its own session: a Ctrl-C in our terminal must not end it before us.
          detached: true,
          stdio: ["ignore", log, log]
        }
      )
      fs.closeSync(log)
      child.unref()
      const ended = Deferred.makeUnsafe<void>()
      child.on("exit", () => Deferred.doneUnsafe(ended, Effect.void))
      child.on("error", () => Deferred.doneUnsafe(ended, Effect.void))
      return { pid: child.pid ?? 0, adopted: false, ended: Deferred.await(ended) }
    },
    catch: (cause) =>
      failed(`PostgreSQL cannot be started in ${place.data}: ${String(cause)}`, cause)
  })

/**
 * The pid file names a process that is not the server of this directory: the server was killed and
 * the number given to another. Our own pid in its place makes PostgreSQL overlook it (it takes it
 * for its parent) while it still looks for old backends that share the memory.
 */
const disown = (place: Place): void => {
  const file = path.join(place.data, "postmaster.pid")
  const text = ifThere(() => fs.readFileSync(file, "utf8"))
  if (text !== undefined) fs.writeFileSync(file, text.replace(/^\d+/, String(process.pid)))
}

/** The end of the log: it says why a server did not start, and never holds mail. */
const lastWords = (place: Place): string =>
  fs.readFileSync(place.log, "utf8").slice(-600).trim().split("\n").slice(-3).join(" / ")

/** A crashed cluster of 2 GB WAL recovers in about a minute on slow disks. */
const patience = Duration.minutes(5)

/**
 * Gives a server that answers: the one that is there, or a new one. `spawned` is told at once of a
 * process that was started, so that it can be stopped when this is interrupted or fails.
 */
export const obtain = Effect.fn("Postmaster.obtain")(function* (
  place: Place,
  binaries: Binaries,
  spawned: (postmaster: Postmaster) => Effect.Effect<void>
) {
  // Backends of a killed postmaster need a moment to notice; a new one refuses to start until then.
  for (let attempt = 0; attempt < 6; attempt++) {
    if (attempt > 0) yield* Effect.sleep(Duration.millis(50 * 2 ** attempt))
    const file = readPidFile(place)
    const there = file !== undefined && isPostmaster(place, file.pid)
    if (file !== undefined && !there && isAlive(file.pid)) disown(place)
    const server = there ? adopt(place, file.pid) : yield* launch(place, binaries)
    yield* spawned(server)
    const ready = yield* Effect.raceFirst(
      waitReady(place, server),
      Effect.as(server.ended, false)
    ).pipe(Effect.timeoutOption(patience))
    if (Option.isNone(ready)) {
      return yield* failed(`PostgreSQL (process ${server.pid}) in ${place.data} does not answer`)
    }
    if (ready.value) return server
  }
  return yield* failed(`PostgreSQL does not start in ${place.data}: ${lastWords(place)}`)
})

const waitReady = (place: Place, server: Postmaster): Effect.Effect<boolean> =>
  Effect.suspend(() => {
    const file = readPidFile(place)
    const isOpen = file?.pid === server.pid && file.run !== ""
    return isOpen ? answers(place, file) : Effect.succeed(false)
  }).pipe(Effect.repeat({ until: (ready) => ready, schedule: Schedule.spaced("10 millis") }))

/** Time for a fast shutdown: it ends the sessions, writes a checkpoint and leaves. */
const grace = Duration.seconds(10)

/**
 * Fast shutdown, after `grace` an immediate one; never SIGKILL, which could leave backends behind
 * that write into a directory a new server already uses.
 */
export const stop = Effect.fn("Postmaster.stop")(function* (place: Place, server: Postmaster) {
  for (const signal of ["SIGINT", "SIGQUIT"] as const) {
    if (!isPostmaster(place, server.pid)) return
    yield* Effect.ignore(Effect.try(() => process.kill(server.pid, signal))) // it may end just now
    if (Option.isSome(yield* Effect.timeoutOption(server.ended, grace))) return
    yield* Effect.logWarning(`PostgreSQL (process ${server.pid}) does not end by ${signal}`)
  }
})
