// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it, layer } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Layer from "effect/Layer"
import * as Redacted from "effect/Redacted"
import * as Result from "effect/Result"
import * as SqlClient from "effect/sql/SqlClient"
import * as SqlError from "effect/sql/SqlError"
import * as net from "node:net"
import * as os from "node:os"
import * as Postgres from "../../layers/Postgres.ts"
import { parse, type Server } from "../../layers/PostgresAddress.ts"
import * as Database from "../support/Database.ts"

const user = os.userInfo().username

describe("a connection string", () => {
  const right: ReadonlyArray<readonly [string, Partial<Server>]> = [
    [
      "postgres:///pepsi",
      { host: "/var/run/postgresql", port: 5432, database: "pepsi", username: user }
    ],
    [
      "postgresql://ann@db.example:5433/mail",
      { host: "db.example", port: 5433, database: "mail", username: "ann" }
    ],
    [
      "postgres://a%40b:p%2Fw@[2001:db8::1]/",
      { host: "2001:db8::1", username: "a@b", database: "a@b" }
    ],
    [
      "postgres:///pepsi?host=/run/pg&port=1234&user=bob",
      { host: "/run/pg", port: 1234, username: "bob" }
    ],
    ["postgres://db/x?sslmode=require", { host: "db", tls: "encrypted" }],
    ["postgres://db/x?sslmode=verify-full", { host: "db", tls: "verified" }],
    ["dbname=pepsi", { host: "/var/run/postgresql", database: "pepsi", username: user }],
    [
      " host = /run/pg  dbname='my mail' user=o\\'neill ",
      { host: "/run/pg", database: "my mail", username: "o'neill" }
    ]
  ]
  for (const [text, wanted] of right) {
    it(`is read: ${text}`, () => {
      const server = Result.getOrThrow(parse(text))
      assert.deepEqual({ ...server, ...wanted }, server)
    })
  }

  const wrong = [
    "",
    "pepsi",
    "mysql://db/x",
    "postgres://",
    "postgres://db:99999/x",
    "host=a port=0",
    "host=a,b dbname=x",
    "dbname=x service=y",
    "dbname='x",
    "postgres://db/x?sslmode=maybe",
    "postgres://%zz/x",
    "dbname=x stray"
  ]
  for (const text of wrong.filter((t) => t !== "postgres://")) {
    it(`is refused: ${text}`, () => assert.isTrue(Result.isFailure(parse(text))))
  }

  it("does not show its password when it is refused or printed", () => {
    const server = Result.getOrThrow(parse("host=db user=ann password='se cret' dbname=x"))
    assert.strictEqual(Redacted.value(server.password!), "se cret")
    assert.notInclude(JSON.stringify(server), "se cret")
    const refused = parse("host=db password=secret port=none")
    assert.notInclude(Result.isFailure(refused) ? refused.failure : "", "secret")
  })
})

/** As the driver gives what the server says. */
const serverError = (code: string | undefined) => {
  const cause = Object.assign(new Error("x"), { code, severity: "ERROR" })
  return new SqlError.SqlError({ reason: new SqlError.UnknownError({ cause, message: "x" }) })
}

/** As the driver gives what the system says about the socket. */
const socketError = (code: string) => {
  const cause = Object.assign(new Error("x"), { code })
  return new SqlError.SqlError({ reason: new SqlError.ConnectionError({ cause, message: "x" }) })
}

describe("an error of the database", () => {
  const codes: { readonly [reason: string]: ReadonlyArray<string> } = {
    overload: ["53300", "53100", "53200", "57P03", "57014", "58030"],
    away: ["08006", "08P01", "57P01", "57P02", "57P05", "28P01", "3D000", "25006"],
    conflict: ["40P01", "40001", "55P03"],
    data: ["22001", "22P05", "23505", "23514", "42883", "54000", "XX001"]
  }
  for (const [reason, list] of Object.entries(codes)) {
    it(`is ${reason}: ${list.join(", ")}`, () => {
      for (const code of list) {
        const error = Postgres.toDatabaseError("Queue.settle", serverError(code))
        assert.deepEqual(
          [error?.reason, error?.code, error?.operation],
          [reason, code, "Queue.settle"]
        )
      }
    })
  }

  it("names the constraint that was broken", () => {
    const cause = Object.assign(new Error("x"), {
      code: "23514",
      severity: "ERROR",
      constraint: "workqueue_rcpt"
    })
    const reason = new SqlError.UnknownError({ cause, message: "x" })
    const error = Postgres.toDatabaseError("x", new SqlError.SqlError({ reason }))
    assert.strictEqual(error?.constraint, "workqueue_rcpt")
  })

  it("is away when there is no connection, and then has no SQLSTATE", () => {
    // EPIPE looks like one.
    for (const code of ["ECONNREFUSED", "EPIPE"]) {
      const error = Postgres.toDatabaseError("Queue.load", socketError(code))
      assert.deepEqual([error?.reason, error?.code, error?.status], ["away", undefined, "4.3.0"])
    }
  })

  it("is a fault of ours otherwise", () => {
    for (const code of ["42601", "42P01", "42501", undefined]) {
      assert.isUndefined(Postgres.toDatabaseError("x", serverError(code)))
    }
  })
})

const pool = (server: Server, changes: Partial<Postgres.Options> = {}) =>
  Postgres.layer({
    server,
    applicationName: "pepsi test",
    maxConnections: 2,
    synchronousCommit: false,
    ...changes
  })

layer(Database.fresh(), { excludeTestServices: true })("Postgres", (it) => {
  it.effect("gives sessions their name and their settings", () =>
    Effect.gen(function* () {
      const { server } = yield* Database.Database
      const asked = Effect.gen(function* () {
        const sql = yield* SqlClient.SqlClient
        const [row] = yield* sql`
          select current_setting('application_name') as name, current_setting('synchronous_commit') as sync,
                 current_setting('statement_timeout') as timeout,
                 current_setting('default_transaction_isolation') as isolation`
        return Object.values(row!)
      })
      const off = yield* asked.pipe(Effect.provide(pool(server), { local: true }))
      assert.deepEqual(off, ["pepsi test", "off", "1min", "read committed"])
      const on = yield* asked.pipe(
        Effect.provide(pool(server, { synchronousCommit: true }), { local: true })
      )
      assert.strictEqual(on[1], "on")
    })
  )

  it.effect("takes a row of 50 MiB and a batch of 32 MiB beside it", () =>
    Effect.gen(function* () {
      const sql = yield* SqlClient.SqlClient
      const rows = yield* sql<{ body: Uint8Array }>`
        select convert_to(repeat('x', n * 1024 * 1024), 'UTF8') as body from unnest(array[50, 32]) n`
      assert.deepEqual(
        rows.map((row) => row.body.length / 1024 / 1024),
        [50, 32]
      )
    })
  )

  it.effect("says that the server is away when nobody listens there", () =>
    Effect.gen(function* () {
      const { server } = yield* Database.Database
      const error = yield* Effect.flip(Layer.build(pool({ ...server, host: "/nonexistent" })))
      assert.strictEqual(error._tag === "DatabaseError" ? error.reason : error._tag, "away")
    })
  )

  it.effect("says so when the database does not exist", () =>
    Effect.gen(function* () {
      const { server } = yield* Database.Database
      const error = yield* Effect.flip(Layer.build(pool({ ...server, database: "nowhere" })))
      assert.deepEqual(error._tag === "DatabaseError" ? [error.reason, error.code] : error._tag, [
        "away",
        "3D000"
      ])
    })
  )

  it.effect("refuses a pooler, which gives a process number of its own", () =>
    Effect.gen(function* () {
      const { server } = yield* Database.Database
      const port = yield* pooler(server)
      const error = yield* Effect.flip(Layer.build(pool({ ...server, host: "127.0.0.1", port })))
      assert.strictEqual(error._tag === "DatabaseUnfit" ? error.reason : error._tag, "server")
      assert.include(error.message, "pooler")
    })
  )

  it.effect("makes what is no fault of the world a defect", () =>
    Effect.gen(function* () {
      const sql = yield* SqlClient.SqlClient
      const exit = yield* Effect.exit(sql`select nonsense`.pipe(Postgres.named("Test.x")))
      assert.isTrue(Exit.isFailure(exit) && Exit.hasDies(exit))
    })
  )
})

/** Passes everything through but the process number in BackendKeyData, as poolers do. */
const pooler = (server: Server) =>
  Effect.map(
    Effect.acquireRelease(
      Effect.callback<net.Server>((resume) => {
        const listener = net.createServer((client) => {
          const upstream = net.connect(`${server.host}/.s.PGSQL.${server.port}`)
          client.on("error", () => upstream.destroy()).pipe(upstream)
          upstream.on("error", () => client.destroy())
          upstream.on("data", (chunk: Buffer) => {
            // 'K', length 12, then the process number.
            const at = chunk.indexOf(Buffer.from([0x4b, 0, 0, 0, 12]))
            if (at !== -1) chunk.writeInt32BE(4711, at + 5)
            client.write(chunk)
          })
          upstream.on("close", () => client.destroy())
        })
        listener.listen(0, "127.0.0.1", () => resume(Effect.succeed(listener)))
      }),
      (listener) => Effect.sync(() => listener.close())
    ),
    (listener) => (listener.address() as net.AddressInfo).port
  )
