// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * A real PostgreSQL server of our own in the state directory, reached by a unix socket only; a
 * scoped resource. It is started or adopted, watched while the scope is open and started again
 * when it dies, and shut down with the scope.
 */
import * as PgConnection from "@effect/sql-pg/PgConnection"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Ref from "effect/Ref"
import * as Schedule from "effect/Schedule"
import * as fs from "node:fs"
import * as path from "node:path"
import { EmbeddedPostgresError } from "../src/services/DatabaseError.ts"
import type { Server } from "./PostgresAddress.ts"
import * as Binaries from "./PostgresBinaries.ts"
import * as Place from "./PostgresPlace.ts"
import * as Postmaster from "./Postmaster.ts"

export interface Options {
  /** The state directory; made if it is not there. */
  readonly directory: string
  /** False = use the npm package even where the host has PostgreSQL. Default true. */
  readonly hostBinaries?: boolean
  /** Directories node_modules in which that package is looked for. Default: where Node looks. */
  readonly modules?: ReadonlyArray<string>
  /** Number of a group whose members may use the socket: of the user the daemon runs under. */
  readonly group?: number
  /**
   * Whether a server that was there already is stopped with the scope. Default true; false for a
   * command that runs beside the daemon.
   */
  readonly stopAdopted?: boolean
}

/** The database the mail is in. */
export const database = "pepsi"

export class EmbeddedPostgres extends Context.Service<
  EmbeddedPostgres,
  {
    readonly server: Server
    /** Major version of the server. */
    readonly major: number
    /** Pid of the server as it is now; another after it had to be started again. */
    readonly pid: Effect.Effect<number>
  }
>()("pepsi/layers/EmbeddedPostgres") {}

const serverOf = (run: string): Server => ({
  host: run,
  port: Postmaster.port,
  database,
  username: Postmaster.superuser
})

/** Whether a cluster was ever made in a directory. */
export const isMade = (directory: string): boolean =>
  fs.existsSync(path.join(directory, "postgres"))

/** The address of a server that runs in `directory`, if there is one. For commands. */
export const locate = (directory: string): Effect.Effect<Server | undefined> =>
  Effect.sync(() => {
    const run = path.join(directory, "run")
    if (!fs.existsSync(path.join(run, `.s.PGSQL.${Postmaster.port}`))) return undefined
    return serverOf(fs.realpathSync(run))
  })

/** SQLSTATE duplicate_database, and the unique key behind it when two make it at once. */
const isThere = new Set(["42P04", "23505"])

const createDatabase = (server: Server): Effect.Effect<void, EmbeddedPostgresError> =>
  Effect.scoped(
    Effect.gen(function* () {
      const session = yield* PgConnection.make({ ...server, database: "postgres" })
      const rows = yield* session.queryValues(
        "select from pg_database where datname = $1",
        [database],
        false
      )
      if (rows.length === 0) yield* session.query(`create database ${database}`, [], false)
    })
  ).pipe(
    Effect.catchTag("SqlError", (error) =>
      isThere.has(String((error.reason.cause as { readonly code?: unknown }).code))
        ? Effect.void
        : Effect.fail(
            new EmbeddedPostgresError({
              reason: "start",
              detail: `the database ${database} cannot be made: ${String(error.reason.cause)}`,
              cause: error
            })
          )
    )
  )

/** 10 MiB hold weeks of a healthy server; a sick one must not fill the disk it needs. */
const maxLogBytes = 10 * 1024 * 1024

/** The server appends, so cutting the file to nothing under it is safe. */
const boundLog = (log: string): Effect.Effect<void> =>
  Effect.sync(() => {
    const stats = fs.statSync(log, { throwIfNoEntry: false })
    if (stats !== undefined && stats.size > maxLogBytes) fs.truncateSync(log)
  })

/** A server that ran this long had no trouble with starting. */
const healthy = Duration.seconds(2)
/** Before the next start of one that did not; its recovery takes seconds besides. */
const shortPause = Duration.millis(250)
/** Before the next try to start one that cannot be started. */
const longPause = Duration.seconds(10)

/** Starts it again whenever it ends. */
const watch = <E>(
  current: Ref.Ref<Postmaster.Postmaster | undefined>,
  again: Effect.Effect<Postmaster.Postmaster, E>
): Effect.Effect<never> =>
  Effect.gen(function* () {
    while (true) {
      const [lived] = yield* Effect.timed((yield* Ref.get(current))?.ended ?? Effect.void)
      yield* Effect.logWarning("PostgreSQL has ended; starting it again")
      if (Duration.isLessThan(lived, healthy)) yield* Effect.sleep(shortPause)
      const server = yield* again.pipe(
        Effect.tapError((error) => Effect.logError("PostgreSQL does not start", error)),
        Effect.retry(Schedule.spaced(longPause)),
        Effect.orDie // the schedule has no end
      )
      yield* Effect.logInfo(`PostgreSQL runs again (process ${server.pid})`)
    }
  })

const make = Effect.fn("EmbeddedPostgres.make")(function* (options: Options) {
  const place = yield* Place.prepare(options.directory, options.group)
  const found = yield* Binaries.find({
    data: place.data,
    hostBinaries: options.hostBinaries ?? true,
    modules: options.modules
  })
  const binaries = yield* Place.reachable(place, found)
  if (Binaries.majorOf(place.data) === undefined) yield* Postmaster.initialize(place, binaries)
  yield* boundLog(place.log)
  if (place.base !== place.directory) {
    yield* Effect.logInfo(`the database of ${place.directory} lies in ${place.base}`)
  }

  const current = yield* Ref.make<Postmaster.Postmaster | undefined>(undefined)
  yield* Effect.addFinalizer(() =>
    Effect.flatMap(Ref.get(current), (server) =>
      server === undefined || (server.adopted && options.stopAdopted === false)
        ? Effect.void
        : Postmaster.stop(place, server)
    )
  )
  const obtain = Postmaster.obtain(place, binaries, (server) => Ref.set(current, server))
  const running = yield* obtain
  const server = serverOf(place.run)
  yield* createDatabase(server)
  const how = running.adopted ? "was running" : "started"
  yield* Effect.logInfo(`PostgreSQL ${binaries.major} ${how} (process ${running.pid})`)
  // Forked last: interrupted before the finalizer above stops the server.
  yield* Effect.forkScoped(watch(current, obtain))
  yield* Effect.forkScoped(Effect.repeat(boundLog(place.log), Schedule.spaced("1 minute")))
  return EmbeddedPostgres.of({
    server,
    major: binaries.major,
    pid: Effect.map(Ref.get(current), (now) => now?.pid ?? running.pid)
  })
})

export const layer = (options: Options): Layer.Layer<EmbeddedPostgres, EmbeddedPostgresError> =>
  Layer.effect(EmbeddedPostgres, make(options))
