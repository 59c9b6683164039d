// SPDX-License-Identifier: AGPL-3.0-or-later
/** The table of the queue and how it is read: migrations 0001 and 0002. */
import { assert, layer } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as Queue from "effect/Queue"
import * as fs from "node:fs"
import * as Database from "../support/Database.ts"
import * as Sql from "../support/Sql.ts"

const sample = fs.readFileSync(
  new URL("../vectors/queue/sample-insert.sql", import.meta.url),
  "utf8"
)

const text = (octets: Uint8Array): string => Buffer.from(octets).toString("latin1")

layer(Database.fresh(), { excludeTestServices: true })("the queue's table", (it) => {
  it.effect("takes the sample INSERT of the original unchanged, 50,000 rows", () =>
    Effect.gen(function* () {
      const sql = yield* Sql.empty
      yield* sql.q(sample)
      const known = `status = 'pending' and rev = 0 and fair_key = 'd:example.org'
        and settings_for is null and hdr_flags is null`
      assert.strictEqual(yield* sql.count(known), 50_000)
      const [row] = yield* sql.q("select * from pepsi.workqueue order by id limit 1")
      assert.strictEqual(row!["token"], "bulk-1")
      assert.strictEqual(row!["body"].length, 2400)
      assert.strictEqual(Number(row!["size"]), row!["headers"].length + 2 + 2400)
    })
  )

  it.effect("has the columns of the contract, and neither stage nor rev in an index", () =>
    Effect.gen(function* () {
      const sql = yield* Sql.empty
      const columns = yield* sql.q(`
        select attname::text as name from pg_attribute
         where attrelid = 'pepsi.workqueue'::regclass and attnum > 0 and not attisdropped`)
      const wanted =
        "token mail_from rcpt_to from_header subject headers body stage status state id rev size fair_key" +
        " settings_for hdr_flags message_id list_id received_at next_at attempts crashes last_error parked_reason" +
        " parked_ref parked_until parked_to body_id"
      assert.deepStrictEqual(columns.map((c) => c["name"]).toSorted(), wanted.split(" ").toSorted())
      const indexes = yield* sql.q(`
        select regexp_replace(indexdef, '.* USING btree ', '') as def from pg_indexes
         where schemaname = 'pepsi' and tablename = 'workqueue'`)
      assert.strictEqual(indexes.length, 8)
      assert.isFalse(indexes.some((i) => /stage|rev\b|attempts/.test(i["def"])))
    })
  )

  it.effect("fills size and fair key where they are missing: login, domain, generated", () =>
    Effect.gen(function* () {
      const sql = yield* Sql.empty
      const insert = (values: string) =>
        sql.q(`insert into pepsi.workqueue
          (token, mail_from, rcpt_to, headers, body, stage, state, size, fair_key) values ${values}`)
      yield* insert(`
        ('1', 'a+1@X.Example', '{r@h}', 'H: 1', 'b', 'init', '{}', null, null),
        ('2', '', '{r@h}', 'H: 1', 'b', 'init', '{}', null, null),
        ('3', 'a@x', '{r@h}', 'H: 1', 'b', 'init', '{"user": "ann"}', null, null),
        ('4', 'a@x', '{r@h}', 'H: 1', 'b', 'init', '{}', 999, 'n:192.0.2.0/24')`)
      assert.deepEqual(
        yield* sql.q("select fair_key as f, size::int as s from pepsi.workqueue order by id"),
        [
          { f: "d:x.example", s: 7 },
          { f: ":gen", s: 7 },
          { f: "u:ann", s: 7 },
          {
            f: "n:192.0.2.0/24",
            s: 999
          }
        ]
      )
      // A token becomes part of a file name.
      yield* Sql.fails(
        insert("('a/b', '', '{r@h}', 'H: 1', 'b', 'init', '{}', null, null)"),
        "23514"
      )
    })
  )

  it.effect("is scanned in pages by id, pending rows only, and refilled by key and section", () =>
    Effect.gen(function* () {
      const sql = yield* Sql.empty
      yield* sql.put(30)
      yield* sql.put(5, { stage: "b" })
      yield* sql.q("update pepsi.workqueue set status = 'held' where id % 7 = 0")
      const got: Array<Sql.Row> = []
      for (let after = 0n; ; ) {
        const page = yield* sql.q("select * from pepsi.ready_scan($1, 4)", [after])
        got.push(...page)
        if (page.length < 4) break
        after = page.at(-1)!["id"]
      }
      assert.deepEqual(
        got,
        yield* sql.q(`select id, rev, stage, size, fair_key, attempts, crashes from pepsi.workqueue
                       where status = 'pending' order by id`)
      )
      const refill = (key: string, stage: string, after: bigint) =>
        Effect.map(
          sql.q("select * from pepsi.ready_refill($1, $2, $3, 100)", [key, stage, after]),
          (r) => r.length
        )
      const pending = (stage: string) => sql.count(`stage = '${stage}' and status = 'pending'`)
      assert.strictEqual(yield* refill("d:a.example", "b", 0n), yield* pending("b"))
      assert.strictEqual(yield* refill("d:none", "b", 0n), 0)
      assert.strictEqual(
        yield* refill("d:a.example", "init", got[3]!["id"]),
        (yield* pending("init")) - 4
      )
    })
  )

  it.effect(
    "loads by level, with settings given, derived or unknown; fenced and held rows stay away",
    () =>
      Effect.gen(function* () {
        const sql = yield* Sql.empty
        yield* sql.q(`insert into pepsi.address_settings (address, settings) values
        ('@', '{"s": 0}'), ('@h.example', '{"s": 1}'), ('r@h.example', '{"s": 2}'), ('z@z', '{"s": 9}')`)
        const ids = (yield* sql.put(4, { body: Buffer.alloc(9000, "x") })).map((r) => r.id)
        yield* sql.q("update pepsi.workqueue set settings_for = '{z@z,q@q}' where id = $1", [
          ids[1]
        ])
        yield* sql.q(`update pepsi.workqueue set rcpt_to = '{"R+news@H.example"}' where id = $1`, [
          ids[2]
        ])
        const load = (level: number, prefix = 10) =>
          sql.q("select * from pepsi.load($1, '{0,0,0,0}', $2, $3) order by i", [
            ids,
            level,
            prefix
          ])

        let rows = yield* load(0)
        assert.deepEqual(
          rows.map((r) => r["i"]),
          [1, 2, 3, 4]
        )
        assert.isTrue(rows.every((r) => r["headers"] === null && r["body"] === null))
        const derived = { "@": { s: 0 }, "@h.example": { s: 1 }, "r@h.example": { s: 2 } }
        assert.deepEqual(
          rows.map((r) => r["settings"]),
          [derived, { "z@z": { s: 9 } }, derived, derived]
        )
        rows = yield* load(1)
        assert.strictEqual(String(Buffer.from(rows[0]!["headers"])), "A: b\r\n")
        assert.isNull(rows[0]!["body"])
        assert.strictEqual((yield* load(2))[0]!["body"].length, 10)
        assert.strictEqual((yield* load(3))[0]!["body"].length, 9000)

        yield* sql.q(
          `with b as (insert into pepsi.body (data) values ('shared') returning id)
        update pepsi.workqueue w set body = null, body_id = b.id from b where w.id = $1`,
          [ids[0]]
        )
        assert.strictEqual(String(Buffer.from((yield* load(3))[0]!["body"])), "shared")
        assert.strictEqual(String(Buffer.from((yield* load(2, 3))[0]!["body"])), "sha")
        assert.strictEqual(
          String(Buffer.from(yield* sql.one("select pepsi.slice($1, 2, 2)", [ids[0]]))),
          "ha"
        )
        yield* sql.q("update pepsi.workqueue set status = 'held' where id = $1", [ids[3]])
        yield* sql.q("update pepsi.workqueue set rev = 1 where id = $1", [ids[2]])
        assert.deepEqual(
          (yield* load(0)).map((r) => r["i"]),
          [1, 2]
        )
      })
  )

  it.effect("takes a message by SQL: line ends, missing body, NUL, octets kept, a notice", () =>
    Effect.gen(function* () {
      const sql = yield* Sql.empty
      const notices = yield* (yield* Sql.open).session.listen("workqueue")
      const inject = Effect.fnUntraced(function* (message: string) {
        const token = yield* sql.one("select pepsi.workqueue_inject($1, $2, $3)", [
          "a@b.example",
          ["c@d"],
          Buffer.from(message, "latin1")
        ])
        const [row] = yield* sql.q("select * from pepsi.workqueue where token = $1", [token])
        return { ...row!, headers: text(row!["headers"]), body: text(row!["body"]) } as Sql.Row
      })
      const row = yield* inject("A: 1\nB: \xfc\n\nhi\rthere\r\n")
      assert.deepEqual(
        [row["headers"], row["body"], row["fair_key"], row["state"]],
        ["A: 1\r\nB: \xfc\r\n", "hi\r\nthere\r\n", "d:b.example", { local_origin: true }]
      )
      assert.match(row["token"], /^[0-9a-f]{32}$/)
      for (const bare of ["A: 1", "A: 1\r\n\r\n"]) {
        const { body, headers } = yield* inject(bare)
        assert.deepEqual([headers, body], ["A: 1\r\n", ""])
      }
      yield* Sql.fails(Effect.asVoid(inject("A: \0\n\n")), "22023")
      yield* Sql.fails(Effect.asVoid(inject("\nbody")), "22023")
      assert.strictEqual((yield* Queue.takeN(notices, 3)).length, 3)
    })
  )
})
