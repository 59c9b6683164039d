// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Runs once before all tests: one PostgreSQL for the whole run, in a directory of its own, with the
 * migrated database that each test file clones. Stopped and deleted after the last test.
 */
import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Layer from "effect/Layer"
import * as Logger from "effect/Logger"
import * as Scope from "effect/Scope"
import * as SqlClient from "effect/sql/SqlClient"
import { execFileSync } from "node:child_process"
import * as fs from "node:fs"
import * as os from "node:os"
import * as path from "node:path"
import * as process from "node:process"
import { fileURLToPath } from "node:url"
import type { TestProject } from "vitest/node"
import * as EmbeddedPostgres from "../../layers/EmbeddedPostgres.ts"
import * as Migrations from "../../layers/Migrations.ts"
import * as Postgres from "../../layers/Postgres.ts"
import type { Server } from "../../layers/PostgresAddress.ts"

/** What each test file may inject. */
export interface Provided {
  /** The server of this run; its database is the one to make others from. */
  readonly postgres: { readonly server: Server; readonly template: string }
  /** A directory of this run that everybody may enter; it and what is in it go with the run. */
  readonly temporary: string
}

declare module "vitest" {
  interface ProvidedContext extends Provided {}
}

const template = "pepsi_template"
const prefix = "pepsi-test-"

/**
 * PEPSI_TEST_POSTGRES=npm runs the tests on the version of the npm package, whatever the host has.
 */
const hostBinaries = process.env["PEPSI_TEST_POSTGRES"] !== "npm"

/** State directories with a server below `run`. */
const clusters = (run: string): ReadonlyArray<string> =>
  fs
    .globSync("{*,*/*,*/*/*}/postmaster.pid", { cwd: run })
    .map((file) => path.join(run, path.dirname(path.dirname(file))))

/** Runs that were killed: their servers are stopped and their directories deleted. */
const sweep = Effect.gen(function* () {
  for (const name of fs.readdirSync(os.tmpdir()).filter((n) => n.startsWith(prefix))) {
    const pid = name.slice(prefix.length).split("-")[0]
    if (fs.existsSync(`/proc/${pid}`) || !fs.existsSync("/proc/self")) continue
    const run = path.join(os.tmpdir(), name)
    for (const directory of clusters(run)) {
      // Adopted, and stopped with its scope.
      yield* Effect.ignore(Effect.scoped(Layer.build(EmbeddedPostgres.layer({ directory }))))
    }
    fs.rmSync(run, { recursive: true, force: true })
  }
})

const migrateTemplate = Effect.fnUntraced(function* (server: Server) {
  const pool = (database: string) =>
    Postgres.layer({
      server: { ...server, database },
      applicationName: "test setup",
      maxConnections: 1,
      synchronousCommit: false
    })
  yield* Effect.gen(function* () {
    const sql = yield* SqlClient.SqlClient
    yield* sql`create database ${sql(template)}`
  }).pipe(Effect.provide(pool(server.database), { local: true }))
  yield* Migrations.migrate.pipe(Effect.provide(pool(template), { local: true }))
})

const start = Effect.gen(function* () {
  yield* sweep
  const temporary = yield* Effect.acquireRelease(
    Effect.sync(() => fs.mkdtempSync(path.join(os.tmpdir(), `${prefix}${process.pid}-`))),
    (made) => Effect.sync(() => fs.rmSync(made, { recursive: true, force: true }))
  )
  fs.chmodSync(temporary, 0o711) // under root the server has an account of its own
  const directory = path.join(temporary, "cluster")
  const cluster = yield* Layer.build(EmbeddedPostgres.layer({ directory, hostBinaries }))
  const pg = Context.get(cluster, EmbeddedPostgres.EmbeddedPostgres)
  yield* migrateTemplate(pg.server)
  return { server: pg.server, temporary }
})

export default async function setup(project: TestProject): Promise<() => Promise<void>> {
  // The whole program is tested as it is shipped.
  execFileSync(process.execPath, [
    fileURLToPath(new URL("../../scripts/build.mjs", import.meta.url))
  ])
  const scope = Scope.makeUnsafe()
  const quiet = Effect.provide(Logger.layer([]))
  const close = () => Effect.runPromise(quiet(Scope.close(scope, Exit.void)))
  const { server, temporary } = await Effect.runPromise(
    quiet(Scope.provide(start, scope).pipe(Effect.onError(() => Scope.close(scope, Exit.void))))
  )
  project.provide("postgres", { server, template })
  project.provide("temporary", temporary)
  return close
}
