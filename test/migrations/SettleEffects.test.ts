// SPDX-License-Identifier: AGPL-3.0-or-later
/** What a settle makes beside its rows: side writes, emissions, children. Migration 0003. */
import { assert, layer } from "@effect/vitest"
import * as Effect from "effect/Effect"
import { sqlState } from "../../layers/Postgres.ts"
import * as Database from "../support/Database.ts"
import * as Sql from "../support/Sql.ts"

const bytes = (text: string): Buffer => Buffer.from(text)
const text = (octets: Uint8Array): string => Buffer.from(octets).toString()
const { childToken } = Sql

type Plain = { readonly id: bigint; readonly rev: number }

/** A stage that answers `sender` once an hour. */
const answer = (x: Plain, k: number, sender: string): Sql.Wish => ({
  ...x,
  v: "pass",
  to_stage: "local",
  writes: [{ name: "claim_reply", recipient: "me@h", sender, interval: 3600 }],
  emit: [
    {
      token: childToken("p", "vacation", k + sender),
      stage: "out",
      rcpt_to: [sender],
      headers: 1,
      body: 2,
      if: 0,
      state: { generated: "vacation" }
    }
  ]
})
const reply = [bytes("Subject: away\r\n"), bytes("away\r\n")]

const kid = (k: number) => ({ token: `big${k}`, stage: "o", rcpt_to: ["q@q"] })

layer(Database.fresh(), { excludeTestServices: true })("what a settle brings along", (it) => {
  it.effect(
    "emitIf: won once, lost afterwards and inside one batch, won again after the interval",
    () =>
      Effect.gen(function* () {
        const sql = yield* Sql.empty
        const r = yield* sql.put(5)
        let s = yield* sql.settle(
          [answer(r[0]!, 0, "a@x"), answer(r[1]!, 1, "a@x"), answer(r[2]!, 2, "b@x")],
          reply
        )
        assert.deepEqual(
          [s.is("applied"), s.is("emission")],
          [
            [1, 2, 3],
            [1, 3]
          ]
        )
        const e = s.of("emission")[0]!
        assert.deepEqual(
          [e["rev"], e["stage"], e["status"], Number(e["size"]), e["fair_key"], e["attempts"]],
          [0, "out", "pending", 15 + 2 + 6, ":gen", 0]
        )
        const m = (yield* sql.row(e["id"]))!
        assert.deepEqual(
          [m["mail_from"], m["rcpt_to"], m["state"], text(m["body"]), m["hdr_flags"]],
          ["", ["a@x"], { generated: "vacation" }, "away\r\n", null]
        )
        s = yield* sql.settle([answer(r[3]!, 3, "a@x")], reply)
        assert.deepEqual([s.is("applied"), s.is("emission")], [[1], []]) // the row advances either way
        yield* sql.q("update pepsi.reply_ledger set at = at - interval '2 hours'")
        assert.deepEqual((yield* sql.settle([answer(r[4]!, 4, "a@x")], reply)).is("emission"), [1])
      })
  )

  it.effect("emitIf: of two settles that race for one reply exactly one sends it", () =>
    Effect.gen(function* () {
      const sql = yield* Sql.empty
      const other = yield* Sql.open
      for (let k = 0; k < 30; k++) {
        const r = yield* sql.put(2)
        const [a, b] = yield* Effect.all(
          [
            sql.settle([answer(r[0]!, 2 * k, `c${k}`)], reply),
            other.settle([answer(r[1]!, 2 * k + 1, `c${k}`)], reply)
          ],
          { concurrency: 2 }
        )
        assert.strictEqual(a.of("emission").length + b.of("emission").length, 1)
        assert.strictEqual(a.of("applied").length + b.of("applied").length, 2)
      }
    })
  )

  it.effect(
    "a later migration adds a write by one CREATE FUNCTION; an unknown name is refused",
    () =>
      Effect.gen(function* () {
        const sql = yield* Sql.empty
        yield* sql.q(`create table pepsi.sent_log (
        hash text collate "C", rcpt text collate "C", sender text, primary key (hash, rcpt))`)
        yield* sql.q(`create function pepsi.write_log_sent(p_calls jsonb) returns setof int language sql as $$
        with c as materialized (
          select distinct on (c.hash collate "C", c.rcpt collate "C") *
            from jsonb_to_recordset(p_calls) as c(n int, hash text, rcpt text, sender text)
           order by c.hash collate "C", c.rcpt collate "C", c.n),
        x as (
          insert into pepsi.sent_log as t
          select c.hash, c.rcpt, c.sender from c order by c.hash collate "C", c.rcpt collate "C"
          on conflict do nothing returning t.hash, t.rcpt)
        select c.n from c join x on x.hash = c.hash collate "C" and x.rcpt = c.rcpt collate "C" $$`)
        const r = yield* sql.put(4)
        const sent = { name: "log_sent", hash: "h", rcpt: "r", sender: "s" }
        const known = { name: "whitelist_upsert", address: "me", kind: "addr", peer: "r" }
        yield* sql.settle([
          { ...r[0]!, v: "done", writes: [sent, { ...known, for: 60 }] },
          { ...r[1]!, v: "done", writes: [known, sent] }
        ])
        assert.strictEqual(yield* sql.count(), 2)
        assert.strictEqual(yield* sql.one("select count(*)::int from pepsi.sent_log"), 1)
        assert.strictEqual(yield* sql.one("select count(*)::int from pepsi.whitelist"), 1)
        for (const name of ["nonsense", `x"(null); drop table pepsi.workqueue; --`]) {
          yield* Sql.fails(sql.settle([{ ...r[2]!, v: "done", writes: [{ name, a: 1 }] }]), "42883")
        }
        assert.strictEqual(yield* sql.count(), 2)
      })
  )

  it.effect(
    "side writes of four sessions with the same keys never deadlock: 1,000 batches of 16",
    () =>
      Effect.gen(function* () {
        const sql = yield* Sql.empty
        const batches = 1000
        const size = 16
        const r = yield* sql.put(batches * size)
        let seed = 5
        const key = (n: number) => {
          seed = (seed * 1664525 + 1013904223) >>> 0
          return Math.floor((seed / 2 ** 32) * n)
        }
        let next = 0
        let dead = 0
        const work = Effect.scoped(
          Effect.gen(function* () {
            const session = yield* Sql.open
            while (next < batches) {
              const at = next++ * size
              yield* session
                .settle(
                  r.slice(at, at + size).map((x, k) => {
                    const writes = [
                      {
                        name: "claim_reply",
                        recipient: `r${key(8)}`,
                        sender: `s${key(25)}`,
                        interval: 0
                      },
                      {
                        name: "whitelist_upsert",
                        address: `a${key(10)}`,
                        kind: "addr",
                        peer: `p${key(20)}`
                      }
                    ]
                    const v = k % 3 === 0 ? "pass" : "done"
                    return {
                      ...x,
                      v,
                      to_stage: "z",
                      writes: k % 2 === 0 ? writes : writes.toReversed()
                    }
                  })
                )
                .pipe(
                  Effect.catchIf(
                    (e) => sqlState(e) === "40P01",
                    () => Effect.sync(() => dead++)
                  )
                )
            }
          })
        )
        yield* Effect.all([work, work, work, work], { concurrency: 4 })
        assert.strictEqual(dead, 0)
        assert.strictEqual(yield* sql.count("stage = 'init'"), 0)
      })
  )

  it.effect(
    "fan-out: children inherit the patched parent, tokens name them, a replay makes no second one",
    () =>
      Effect.gen(function* () {
        const sql = yield* Sql.empty
        const [a] = yield* sql.put(1, { state: { k: 1, drop: 2 } })
        const token = (yield* sql.row(a!.id))!["token"]
        const kids = ["u@x", "v@x"].map((u) => ({
          token: childToken(token, "dot-forward", u),
          stage: "out",
          rcpt_to: [u],
          unset: ["drop"]
        }))
        const own = {
          ...kids[0]!,
          token: "fresh1",
          fresh: true,
          state: { f: 1 },
          body: 2,
          after: 60,
          fair_key: "u:me"
        }
        const s = yield* sql.settle(
          [
            {
              ...a!,
              v: "pass",
              to_stage: "local",
              state: { auth: "ok" },
              headers: 1,
              children: [...kids, own]
            }
          ],
          [bytes("N: 1\r\n"), bytes("own")]
        )
        assert.deepEqual(s.is("child"), [1, 1, 1])
        const child = (name: string) =>
          Effect.map(sql.q("select * from pepsi.workqueue where token = $1", [name]), ([x]) => x!)
        for (const { token: name } of kids) {
          const x = yield* child(name)
          assert.deepEqual(
            [
              x["state"],
              text(x["headers"]),
              text(x["body"]),
              x["mail_from"],
              x["fair_key"],
              Number(x["size"])
            ],
            [{ k: 1, auth: "ok" }, "N: 1\r\n", "body\r\n", "x1@a.example", "d:a.example", 14]
          )
        }
        const f = yield* child("fresh1")
        assert.deepEqual(
          [f["state"], text(f["body"]), f["status"], f["fair_key"], Number(f["size"])],
          [{ f: 1 }, "own", "deferred", "u:me", 11]
        )
        assert.deepEqual(
          s.of("applied").map((x) => [x["rev"], x["stage"], x["status"], Number(x["size"])]),
          [[1, "local", "pending", 14]]
        )
        const again = yield* sql.settle([{ id: a!.id, rev: 1, v: "fanout", children: kids }])
        assert.deepEqual([again.is("child"), again.is("applied")], [[], [1]])
        assert.strictEqual(yield* sql.count(), 3)

        const [b] = yield* sql.put(1)
        const child9 = { token: "c9", stage: "o", rcpt_to: ["q@q"] }
        const e = yield* sql.settle([{ ...b!, v: "fanout", state: { p: 2 }, children: [child9] }])
        assert.isUndefined(yield* sql.row(b!.id))
        assert.deepEqual((yield* sql.row(e.of("child")[0]!["id"]))!["state"], { p: 2 })
        assert.deepEqual(
          e.of("applied").map((x) => x["status"]),
          ["gone"]
        )

        const [c] = yield* sql.put(1)
        yield* Sql.fails(sql.settle([{ ...c!, v: "fanout", children: [] }]), "22023")
        yield* Sql.fails(sql.settle([{ ...c!, v: "fanout" }]), "22023")
        const twins = [
          { ...child9, token: "d" },
          { ...child9, token: "d" }
        ]
        yield* Sql.fails(sql.settle([{ ...c!, v: "fanout", children: twins }]), "22023")
        assert.isDefined(yield* sql.row(c!.id))
      })
  )

  it.effect(
    "a fan-out whose commit was undone names its children alike when it is done again",
    () =>
      Effect.gen(function* () {
        const sql = yield* Sql.empty
        const [a] = yield* sql.put(1)
        const wishes = [
          {
            ...a!,
            v: "fanout",
            children: ["x", "y"].map((key) => ({
              token: childToken("p", "s", key),
              stage: "o",
              rcpt_to: [`${key}@q`]
            }))
          }
        ]
        yield* sql.q("begin")
        yield* sql.settle(wishes)
        yield* sql.q("rollback")
        assert.strictEqual(yield* sql.count(), 1)
        yield* sql.settle(wishes)
        assert.deepEqual((yield* sql.settle(wishes)).is("fenced"), [1])
        assert.strictEqual(yield* sql.count(), 2)
        assert.strictEqual(yield* sql.count(`token = '${childToken("p", "s", "x")}'`), 1)
      })
  )

  it.effect("fan-out of a large body: one copy for all heirs, swept after the last", () =>
    Effect.gen(function* () {
      const sql = yield* Sql.empty
      const [a] = yield* sql.put(1, { body: Buffer.alloc(100_000, "z") })
      const s = yield* sql.settle(
        [{ ...a!, v: "pass", to_stage: "l", children: [kid(1), kid(2), { ...kid(3), body: 1 }] }],
        [bytes("own")]
      )
      const bodies = sql.one("select count(*)::int from pepsi.body")
      const sweep = sql.one("select pepsi.sweep_bodies()::int")
      assert.strictEqual(yield* bodies, 1)
      assert.strictEqual(yield* sql.count("body_id is not null"), 3)
      assert.strictEqual(yield* sql.count("size = 100008"), 3)
      const [loaded] = yield* sql.q("select body from pepsi.load($1, '{1}', 3)", [[a!.id]])
      assert.strictEqual(loaded!["body"].length, 100_000)
      const c = s.of("child")[0]!
      yield* sql.settle([{ id: c["id"], rev: c["rev"], v: "fanout", children: [kid(4)] }])
      assert.strictEqual(yield* bodies, 1)
      assert.strictEqual(yield* sql.count("body_id is not null"), 3)
      assert.strictEqual(yield* sweep, 0)
      yield* sql.q("delete from pepsi.workqueue")
      assert.strictEqual(yield* sweep, 1)
    })
  )
})
