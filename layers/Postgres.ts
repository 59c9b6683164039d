// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Connections to PostgreSQL: the pool of the daemon, the one session of a worker, and what an SQL
 * error means to our contracts. Touches the server it is given.
 */
import * as PgClient from "@effect/sql-pg/PgClient"
import * as PgConnection from "@effect/sql-pg/PgConnection"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Result from "effect/Result"
import type * as Scope from "effect/Scope"
import type * as SqlClient from "effect/sql/SqlClient"
import { ConnectionError, SqlError } from "effect/sql/SqlError"
import { DatabaseError, DatabaseUnfit } from "../src/services/DatabaseError.ts"
import { parse, type Server } from "./PostgresAddress.ts"
import { supported } from "./PostgresBinaries.ts"

export interface Options {
  readonly server: Server
  /** Shown in pg_stat_activity. */
  readonly applicationName: string
  readonly maxConnections: number
  /** Whether a commit waits for the disk unless its statement says otherwise. */
  readonly synchronousCommit: boolean
}

/**
 * No statement of ours runs longer; one that does waits for a lock that nobody gives back. The
 * client waits `margin` more, because a server that is cut off answers nothing at all.
 */
const statementTimeout = Duration.seconds(60)
const margin = Duration.seconds(15)

/** A batch is at most 32 MiB, or one row of 50 MiB: header, body and the frame around them. */
const maxMessageBytes = 128 * 1024 * 1024

/** Session settings and limits of every connection of ours. */
export const clientConfig = (options: Options): PgClient.PgPoolConfig => {
  const { tls, ...server } = options.server
  return {
    ...server,
    ...(tls === undefined ? {} : { ssl: tls === "verified" || { rejectUnauthorized: false } }),
    applicationName: options.applicationName,
    maxConnections: options.maxConnections,
    minConnections: 1,
    idleTimeout: "5 minutes",
    connectTimeout: "5 seconds",
    // A peer that vanished without a word is noticed after 10 s and ten probes a second apart.
    keepAlive: "10 seconds",
    maxMessageSize: maxMessageBytes,
    startupParameters: {
      synchronous_commit: options.synchronousCommit ? "on" : "off",
      statement_timeout: String(Duration.toMillis(statementTimeout)),
      // READ COMMITTED whatever the server's default: elsewhere a concurrent settle is an error
      // of its own kind and not a fenced row.
      default_transaction_isolation: "read committed",
      // Locks of a host that vanished are free after 20 s, not after the two hours of TCP.
      tcp_keepalives_idle: "10",
      tcp_keepalives_interval: "2",
      tcp_keepalives_count: "5",
      idle_in_transaction_session_timeout: String(Duration.toMillis(statementTimeout))
    }
  }
}

/** The server and how to get a session of one's own. */
export class Postgres extends Context.Service<
  Postgres,
  {
    readonly server: Server
    /**
     * A session outside the pool, for LISTEN and for locks; `settings` go beside the usual ones.
     */
    readonly connect: (settings?: {
      readonly [name: string]: string
    }) => Effect.Effect<PgConnection.PgConnection, SqlError, Scope.Scope>
    /**
     * In a worker: runs `prepare` on the session it has, and on each later one before anything
     * else. Undefined where there is a pool.
     */
    readonly session:
      | undefined
      | {
          readonly prepare: (
            prepare: (session: PgConnection.PgConnection) => Effect.Effect<void, SqlError>
          ) => Effect.Effect<void, SqlError>
          /** Pid of the backend, as it is now. */
          readonly pid: Effect.Effect<number, SqlError>
        }
  }
>()("pepsi/layers/Postgres") {}

/** How to get a session of one's own, with the limits of `options`. */
export const connector = (options: Options) => {
  const config = clientConfig(options)
  return (settings: { readonly [name: string]: string } = {}) =>
    PgConnection.make({
      ...config,
      applicationName: settings["application_name"] ?? options.applicationName,
      startupParameters: { ...config.startupParameters, ...settings }
    })
}

/** The SQLSTATE of an error of the server; the system's codes (EPIPE) come without a severity. */
export const sqlState = (error: SqlError): string | undefined => {
  const { code, severity } = (error.reason.cause ?? {}) as { readonly [field: string]: unknown }
  return typeof code === "string" && severity !== undefined ? code : undefined
}

/**
 * What SQLSTATEs mean, most special first (PostgreSQL manual, appendix A). What is not here is a
 * fault of ours.
 */
const meanings: ReadonlyArray<readonly [RegExp, DatabaseError["reason"]]> = [
  [/^57P03|^57014|^53|^58/, "overload"], // starting, timeout, no room, disk trouble
  [/^08|^57P|^28|^3D|^25006|^25P03/, "away"], // connection, shutdown, logins, standby
  [/^40P01|^40001|^55P03/, "conflict"], // deadlock, serialization, lock timeout
  [/^22|^23|^42883|^54|^XX/, "data"] // values, constraints, unknown write, limits, broken rows
]

/**
 * The server's own words without `detail` and `where`, which quote the row that was refused: an
 * error may be logged, mail may not.
 */
export const withoutContent = (error: SqlError): Error => {
  const code = sqlState(error)
  if (code === undefined || !(error.reason.cause instanceof Error)) return error
  const { constraint, message, table } = error.reason.cause as Error & { [field: string]: unknown }
  return Object.assign(new Error(message), { name: "PostgresError", code, constraint, table })
}

/** The database's error as our contracts have it; undefined = a fault of ours. */
export const toDatabaseError = (operation: string, error: SqlError): DatabaseError | undefined => {
  const cause = withoutContent(error)
  const code = sqlState(error)
  if (code === undefined) {
    const isAway = error.reason._tag === "ConnectionError"
    return isAway ? new DatabaseError({ reason: "away", operation, cause }) : undefined
  }
  const reason = meanings.find(([pattern]) => pattern.test(code))?.[1]
  const { constraint } = cause as { readonly constraint?: string }
  return reason === undefined
    ? undefined
    : new DatabaseError({ reason, operation, code, constraint, cause })
}

/** Fails as a lost connection does. */
export const silent = Effect.fail(
  new SqlError({
    reason: new ConnectionError({ cause: undefined, message: "the server does not answer" })
  })
)

type Translated<E> = Exclude<E, SqlError> | DatabaseError

/** Lets SQL errors that may be the world's become a DatabaseError, others a defect. */
export const translated =
  (operation: string) =>
  <A, E, R>(effect: Effect.Effect<A, E | SqlError, R>): Effect.Effect<A, Translated<E>, R> =>
    Effect.catch(effect, (error): Effect.Effect<never, Translated<E>> => {
      if (!(error instanceof SqlError)) return Effect.fail(error as Exclude<E, SqlError>)
      const known = toDatabaseError(operation, error)
      return known === undefined ? Effect.die(withoutContent(error)) : Effect.fail(known)
    })

/** The same for a method that is one statement, which also ends when the server is cut off. */
export const named = (operation: string) => {
  const translate = translated(operation)
  return <A, E, R>(effect: Effect.Effect<A, E | SqlError, R>) =>
    translate(
      Effect.timeoutOrElse(effect, {
        duration: Duration.sum(statementTimeout, margin),
        orElse: () => silent
      })
    )
}

const unfit = (detail: string, cause?: unknown) =>
  new DatabaseUnfit({ reason: "server", detail, cause })

const pooler = (cause?: unknown) =>
  unfit(
    "a connection pooler answers in place of PostgreSQL: notifications and session locks need" +
      " sessions of their own, so [pepsi-postgres] CONFIG must name the server itself",
    cause
  )

/** Asks once, so that a server that is away or not fit is known at start, before the first mail. */
export const probe = (
  connect: Postgres["Service"]["connect"],
  { host, port }: Server
): Effect.Effect<void, DatabaseError | DatabaseUnfit> =>
  Effect.scoped(
    Effect.gen(function* () {
      const session = yield* connect()
      const rows = yield* session.queryValues(
        "select current_setting('server_version_num')::int4, pg_backend_pid()",
        [],
        false
      )
      const [version, pid] = rows[0] as [number, number]
      if (version < supported.least * 10_000) {
        const major = Math.floor(version / 10_000)
        return yield* unfit(`PostgreSQL ${major} is too old: ${supported.least} is the least`)
      }
      // PgBouncer gives a pid of its own making at login, so that it can route cancellations.
      if (pid !== session.processId) return yield* pooler()
    })
  ).pipe(
    Effect.catchIf(
      // PgBouncer refuses session parameters it cannot keep: protocol_violation.
      (error): error is SqlError => error instanceof SqlError && sqlState(error) === "08P01",
      (error) => Effect.fail(pooler(error))
    ),
    named(host.startsWith("/") ? `connection to ${host}` : `connection to ${host} port ${port}`)
  )

/** What a layer of connections offers to the layers with SQL. */
export type Provided = Postgres | PgClient.PgClient | SqlClient.SqlClient

/** A pool on `options.server`, after it was found fit. */
export const layer = (options: Options): Layer.Layer<Provided, DatabaseError | DatabaseUnfit> => {
  const connect = connector(options)
  return Layer.unwrap(
    Effect.as(
      probe(connect, options.server),
      Layer.mergeAll(
        Layer.succeed(Postgres, { server: options.server, connect, session: undefined }),
        // Its connections are made when they are used: it cannot fail here.
        PgClient.layer(clientConfig(options)).pipe(Layer.orDie)
      )
    )
  )
}

/** The server that [pepsi-postgres] CONFIG names. */
export const serverOf = (config: string): Effect.Effect<Server, DatabaseUnfit> =>
  Result.match(parse(config), {
    onSuccess: Effect.succeed,
    onFailure: (what) =>
      Effect.fail(
        new DatabaseUnfit({
          reason: "config",
          detail: `[pepsi-postgres] CONFIG: ${what}`,
          cause: undefined
        })
      )
  })
