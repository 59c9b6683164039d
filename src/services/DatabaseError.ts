// SPDX-License-Identifier: AGPL-3.0-or-later
/** What our contracts say when the database is at fault, and why it cannot be used at all. */
import * as Schema from "effect/Schema"

/**
 * The database did not do it.
 *
 * - `away`: not reachable, shutting down, or the connection was lost; the statement may or may not
 *   have been carried out (in doubt).
 * - `overload`: it is there but has no room (connections, memory, disk, pool timeout); not done.
 * - `conflict`: deadlock or serialization; not done, once more may help.
 * - `data`: this statement's own values were refused; not done, again is no use.
 */
export class DatabaseError extends Schema.TaggedError<DatabaseError>()("DatabaseError", {
  reason: Schema.Literals(["away", "overload", "conflict", "data"]),
  /** The method of ours that failed, "Queue.settle". */
  operation: Schema.String,
  /** SQLSTATE, where the server gave one. */
  code: Schema.optional(Schema.String),
  /** The constraint that was broken, where the server named one. */
  constraint: Schema.optional(Schema.String),
  cause: Schema.Defect()
}) {
  get status(): "4.3.0" | "4.3.2" | "5.6.0" {
    return this.reason === "overload" ? "4.3.2" : this.reason === "data" ? "5.6.0" : "4.3.0"
  }
  override get message(): string {
    const code = this.code === undefined ? "" : ` (${this.code})`
    return `${this.operation}: database ${this.reason}${code}`
  }
}

/**
 * The database server of our own cannot be had.
 *
 * - `binaries`: no PostgreSQL that we support was found (sysexits EX_UNAVAILABLE, 69).
 * - `version`: the data was made by a major version that is not here (EX_CONFIG, 78).
 * - `directory`: the state directory cannot be made or written (EX_CANTCREAT, 73).
 * - `start`: the server is there and does not come up (EX_UNAVAILABLE, 69).
 */
export class EmbeddedPostgresError extends Schema.TaggedError<EmbeddedPostgresError>()(
  "EmbeddedPostgresError",
  {
    reason: Schema.Literals(["binaries", "version", "directory", "start"]),
    /** One sentence: what, where we looked, what to do. */
    detail: Schema.String,
    cause: Schema.Defect()
  }
) {
  override get message(): string {
    return this.detail
  }
}

/**
 * The server or its database is not one we can work with; all of them EX_CONFIG, 78.
 *
 * - `config`: [pepsi-postgres] CONFIG is not a connection string.
 * - `server`: older than PostgreSQL 15, or a pooler that shares sessions between transactions.
 * - `edited`: a migration that was applied has another content now.
 * - `newer`: the database was migrated by a newer program.
 * - `missing`: it was not migrated at all, or not far enough, and the command makes nothing.
 * - `migration`: a migration failed; nothing of it was kept.
 */
export class DatabaseUnfit extends Schema.TaggedError<DatabaseUnfit>()("DatabaseUnfit", {
  reason: Schema.Literals(["config", "server", "edited", "newer", "missing", "migration"]),
  /** One sentence: what, and what to do. */
  detail: Schema.String,
  cause: Schema.Defect()
}) {
  override get message(): string {
    return this.detail
  }
}
