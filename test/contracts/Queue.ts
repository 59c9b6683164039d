// SPDX-License-Identifier: AGPL-3.0-or-later
/** What every queue must do; run against memory and PostgreSQL. */
import { assert, layer } from "@effect/vitest"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import { randomBytes } from "node:crypto"
import * as Header from "../../src/mail/Header.ts"
import type { Entry, Outcome } from "../../src/pipeline/Job.ts"
import * as Stats from "../../src/pipeline/Stats.ts"
import * as Writes from "../../src/pipeline/Writes.ts"
import { type Admission, Queue } from "../../src/services/Queue.ts"
import { Table } from "../support/MemoryQueue.ts"

/** A token that no other test has. */
export const newToken = (): string => randomBytes(16).toString("hex")

export const message = (changes: Partial<Admission> = {}): Admission => ({
  token: newToken(),
  sender: "ann@a.example",
  recipients: ["bob@b.example", "cat@c.example"],
  fromHeader: "ann@a.example",
  subject: "news",
  messageId: "<1@a.example>",
  listId: null,
  headers: Buffer.from("Subject: news\r\n"),
  body: Buffer.from("hello\r\n"),
  section: "init",
  fairKey: "d:a.example",
  state: { spam: false },
  ...changes
})

export const outcome = (
  of: Pick<Entry, "id" | "rev">,
  changes: Partial<Outcome> = {}
): Outcome => ({
  id: of.id,
  rev: of.rev,
  verdict: "done",
  section: undefined,
  patch: {},
  writes: [],
  children: [],
  emissions: [],
  ...changes
})

const text = (octets: Uint8Array | undefined): string | undefined =>
  octets === undefined ? undefined : Buffer.from(octets).toString("latin1")

const child = (token: string) => ({
  token,
  section: "out",
  recipients: ["kid@k.example"],
  patch: {}
})

const admitOne = Effect.fnUntraced(function* (changes: Partial<Admission> = {}) {
  const queue = yield* Queue
  const [entry] = yield* queue.admit([message(changes)])
  return entry!
})

const rowOf = Effect.fnUntraced(function* (id: number) {
  return (yield* (yield* Table).rows).find((row) => row.id === id)
})

const loose = { durable: false } as const

/** The suite; `make` gives an empty queue. */
export const contract = (name: string, make: () => Layer.Layer<Queue | Table, unknown>): void =>
  layer(make(), { excludeTestServices: true })(`Queue in ${name}`, (it) => {
    it.effect("admits a batch, gives entries in its order, and loads what was admitted", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const messages = Array.from({ length: 64 }, (_, k) =>
          message({
            subject: `no ${k}`,
            section: k % 2 === 0 ? "init" : "other",
            fairKey: `u:${k}`
          })
        )
        const entries = yield* queue.admit(messages)
        assert.deepEqual(
          entries.map((e) => [
            e.section,
            e.fairKey,
            e.sizeBytes,
            e.rev,
            e.attempts,
            e.crashes,
            e.repeat
          ]),
          messages.map((m) => [m.section, m.fairKey, 24, 0, 0, 0, false])
        )
        const loaded = yield* queue.load(entries, "full")
        const sorted = [...loaded].toSorted((a, b) => a.index - b.index)
        assert.deepEqual(
          sorted.map((l) => [l.id, l.token, l.subject]),
          entries.map((e, k) => [e.id, messages[k]!.token, `no ${k}`])
        )
        const { body, headers, receivedAt: _, ...first } = sorted[0]!
        assert.deepEqual(first, {
          index: 0,
          id: entries[0]!.id,
          rev: 0,
          token: messages[0]!.token,
          sender: "ann@a.example",
          recipients: ["bob@b.example", "cat@c.example"],
          fromHeader: "ann@a.example",
          subject: "no 0",
          section: "init",
          state: { spam: false },
          sizeBytes: 24,
          fairKey: "u:0",
          hdrFlags: null,
          messageId: "<1@a.example>",
          listId: null,
          settings: {},
          attempts: 0,
          crashes: 0
        })
        assert.deepEqual([text(headers), text(body)], ["Subject: news\r\n", "hello\r\n"])
      })
    )

    it.effect(
      "R14: a NUL, a lone surrogate and wrong octets refuse no message and reach no text",
      () =>
        Effect.gen(function* () {
          const queue = yield* Queue
          const octets = Buffer.from("a\0b\xe9\r\n", "latin1")
          const entry = yield* admitOne({
            subject: "a\0b",
            fromHeader: "\ud800x",
            messageId: "<\0@x>",
            listId: "\0",
            headers: octets,
            body: octets
          })
          const [loaded] = yield* queue.load([entry], "full")
          assert.deepEqual(
            [loaded!.subject, loaded!.fromHeader, loaded!.messageId, loaded!.listId],
            ["ab", "\ufffdx", "<@x>", ""]
          )
          assert.deepEqual(
            [text(loaded!.headers), text(loaded!.body)],
            ["a\0b\xe9\r\n", "a\0b\xe9\r\n"]
          )
          const [settled] = yield* queue.settle(
            [outcome(entry, { verdict: "pass", section: "b", patch: { subject: "x\0\udfff" } })],
            loose
          )
          const [again] = yield* queue.load([settled!.entry!], "metadata")
          assert.strictEqual(again!.subject, "x\ufffd")
        })
    )

    it.effect("refuses a batch with one message that the table refuses, whole", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const before = yield* (yield* Table).rows
        const refused = yield* Effect.flip(queue.admit([message(), message({ recipients: [] })]))
        assert.strictEqual(refused.reason, "data")
        assert.deepEqual(yield* (yield* Table).rows, before)
      })
    )

    it.effect("loads by level, only pending rows of that rev, with the settings that apply", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const table = yield* Table
        yield* table.setSettings("@set.example", { lang: "de" })
        yield* table.setSettings("x@set.example", { answer: true })
        const entry = yield* admitOne({ recipients: ["X+tag@Set.example"] })
        const get = (level: Parameters<typeof queue.load>[1]) =>
          Effect.map(queue.load([entry], level), ([l]) => l!)
        const metadata = yield* get("metadata")
        assert.deepEqual(metadata.settings, {
          "@set.example": { lang: "de" },
          "x@set.example": { answer: true }
        })
        assert.deepEqual([metadata.headers, metadata.body], [undefined, undefined])
        const headers = yield* get("headers")
        assert.deepEqual([text(headers.headers), headers.body], ["Subject: news\r\n", undefined])
        assert.strictEqual(text((yield* get({ prefix: 3 })).body), "hel")
        assert.strictEqual(text((yield* get("full")).body), "hello\r\n")
        assert.deepEqual(yield* queue.load([{ id: entry.id, rev: 1 }], "metadata"), [])
        yield* table.hold(metadata.token)
        assert.deepEqual(yield* queue.load([entry], "metadata"), [])
      })
    )

    it.effect("scans pending rows in id order and refills one key of one section", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const key = `u:${newToken()}`
        const entries = yield* queue.admit(
          Array.from({ length: 10 }, (_, k) =>
            message({ fairKey: key, section: k < 7 ? "init" : "b" })
          )
        )
        yield* queue.settle([outcome(entries[0]!)], loose)
        const first = entries[0]!.id
        const page = yield* queue.scan(first - 1, 4)
        assert.deepEqual(
          page.map((e) => e.id),
          entries.slice(1, 5).map((e) => e.id)
        )
        assert.isTrue(page.every((e) => e.repeat))
        const found = yield* queue.refill({
          fairKey: key,
          section: "init",
          after: entries[2]!.id,
          limit: 3
        })
        assert.deepEqual(
          found.map((e) => e.id),
          entries.slice(3, 6).map((e) => e.id)
        )
        assert.deepEqual(yield* queue.scan(entries[9]!.id, 4), [])
      })
    )

    it.effect("settles every verdict and says what became of each", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const entries = yield* queue.admit(Array.from({ length: 6 }, () => message()))
        const park = { reason: "key", ref: "k", for: Duration.hours(1), onExpiry: "late" }
        const settled = yield* queue.settle(
          [
            outcome(entries[0]!),
            outcome(entries[1]!, {
              verdict: "pass",
              section: "next",
              patch: { state: { user: "u" }, unset: ["spam"] }
            }),
            outcome(entries[2]!, {
              verdict: "defer",
              after: Duration.minutes(10),
              error: "4.4.1 later"
            }),
            outcome(entries[3]!, { verdict: "park", park }),
            outcome(entries[4]!, { verdict: "fail", error: "5.1.1 nobody" }),
            outcome({ id: entries[5]!.id, rev: 7 }, { verdict: "pass", section: "x" })
          ],
          { durable: true }
        )
        const byIndex = [...settled].toSorted((a, b) => a.index - b.index)
        assert.deepEqual(
          byIndex.map((s) => [s.index, s.kind, s.status, s.id, s.entry?.rev, s.entry?.section]),
          [
            [0, "applied", "gone", entries[0]!.id, undefined, undefined],
            [1, "applied", "pending", entries[1]!.id, 1, "next"],
            [2, "applied", "deferred", entries[2]!.id, 1, "init"],
            [3, "applied", "parked", entries[3]!.id, 1, "init"],
            [4, "applied", "failed", entries[4]!.id, 1, "init"],
            [5, "fenced", undefined, entries[5]!.id, undefined, undefined]
          ]
        )
        assert.deepEqual((yield* rowOf(entries[1]!.id))!.state, { user: "u" })
        const revisions = yield* queue.revisions(entries.map((e) => e.id))
        assert.deepEqual(
          [...revisions].toSorted(([a], [b]) => a - b),
          entries.slice(1).map((e, k) => [e.id, k < 4 ? 1 : 0])
        )
        const due = Option.getOrThrow(yield* queue.nextDue)
        assert.isTrue(due > 0 && due <= 600, String(due))
      })
    )

    it.effect("writes nothing of a batch with one bad outcome", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const entries = yield* queue.admit([message(), message()])
        const before = yield* (yield* Table).rows
        const bad: ReadonlyArray<Partial<Outcome>> = [
          { verdict: "pass" },
          { verdict: "fanout" },
          { verdict: "pass", section: "x", patch: { recipients: [] } },
          { verdict: "done", writes: [{ name: "nonsense", args: {} }] }
        ]
        for (const changes of bad) {
          const error = yield* Effect.flip(
            queue.settle([outcome(entries[0]!), outcome(entries[1]!, changes)], loose)
          )
          assert.strictEqual(error.reason, "data")
        }
        assert.deepEqual(yield* (yield* Table).rows, before)
      })
    )

    it.effect(
      "fan-out: children inherit the patched parent; the same tokens make no second ones",
      () =>
        Effect.gen(function* () {
          const queue = yield* Queue
          const entry = yield* admitOne()
          const tokens = [newToken(), newToken()]
          const header = Header.fromText("Subject: changed\r\n")
          const settled = yield* queue.settle(
            [
              outcome(entry, {
                verdict: "fanout",
                patch: { header, state: { user: "u" } },
                children: [
                  child(tokens[0]!),
                  {
                    ...child(tokens[1]!),
                    patch: { body: Buffer.from("own"), unset: ["spam"] },
                    after: Duration.hours(1)
                  }
                ]
              })
            ],
            loose
          )
          const children = settled.filter((s) => s.kind === "child")
          assert.deepEqual(
            children.map((c) => [c.index, c.entry?.section]),
            [
              [0, "out"],
              [0, "out"]
            ]
          )
          assert.deepEqual(children.map((c) => c.status).toSorted(), ["deferred", "pending"])
          const rows = (yield* (yield* Table).rows).filter((row) => tokens.includes(row.token))
          const own = (token: string) => {
            const row = rows.find((r) => r.token === token)!
            return [
              row.state,
              text(row.headers),
              text(row.body),
              row.sender,
              row.fairKey,
              row.recipients
            ]
          }
          const inherited = ["ann@a.example", "d:a.example", ["kid@k.example"]]
          assert.deepEqual(own(tokens[0]!), [
            { spam: false, user: "u" },
            "Subject: changed\r\n",
            "hello\r\n",
            ...inherited
          ])
          assert.deepEqual(own(tokens[1]!), [
            { user: "u" },
            "Subject: changed\r\n",
            "own",
            ...inherited
          ])
          const other = yield* admitOne()
          const again = yield* queue.settle(
            [outcome(other, { verdict: "fanout", children: [child(tokens[0]!)] })],
            loose
          )
          assert.deepEqual(
            again.map((s) => s.kind),
            ["applied"]
          )
        })
    )

    it.effect("emits once per claim: won, then lost, in one batch and in the next", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const sender = `${newToken()}@x.example`
        const claim = Writes.claimReply("me@h.example", sender, Duration.hours(1))
        const answer = (entry: Entry) =>
          outcome(entry, {
            verdict: "pass",
            section: "local",
            writes: [claim],
            emissions: [
              {
                token: newToken(),
                section: "out",
                recipients: [sender],
                if: 0,
                patch: {
                  header: Header.fromText("Subject: away\r\n"),
                  body: Buffer.from("away\r\n"),
                  state: { spam: false }
                }
              }
            ]
          })
        const entries = yield* queue.admit([message(), message(), message()])
        const first = yield* queue.settle(entries.slice(0, 2).map(answer), loose)
        const second = yield* queue.settle(entries.slice(2).map(answer), loose)
        assert.deepEqual(
          [first, second].map((s) => s.filter((x) => x.kind === "emission").map((x) => x.index)),
          [[0], []]
        )
        const made = first.find((x) => x.kind === "emission")!
        const row = (yield* rowOf(made.id))!
        assert.deepEqual(
          [row.sender, row.fairKey, row.recipients, row.state, text(row.body), made.entry?.section],
          ["", ":gen", [sender], { spam: false }, "away\r\n", "out"]
        )
      })
    )

    it.effect(
      "R50: after a death only rows that were not settled come back, and the third is poison",
      () =>
        Effect.gen(function* () {
          const queue = yield* Queue
          const entries = yield* queue.admit([message(), message()])
          yield* queue.settle([outcome(entries[1]!, { verdict: "pass", section: "n" })], loose)
          const crash = (rev: number) =>
            queue.crashed(
              entries.map((e) => ({ id: e.id, rev })),
              "killed"
            )
          const id = entries[0]!.id
          assert.deepEqual(yield* crash(0), [{ id, rev: 1, crashes: 1, status: "pending" }])
          const late = yield* queue.settle([outcome(entries[0]!)], loose)
          assert.deepEqual(
            late.map((s) => s.kind),
            ["fenced"]
          )
          assert.deepEqual((yield* queue.crashed([{ id, rev: 1 }], "killed"))[0]?.crashes, 2)
          assert.deepEqual(yield* queue.crashed([{ id, rev: 2 }], "killed"), [
            { id, rev: 3, crashes: 3, status: "failed" }
          ])
          assert.deepEqual((yield* rowOf(id))!.state.failure?.class, "poison")
        })
    )

    it.effect("promotes what is due, oldest first, and expires what has waited long enough", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const entries = yield* queue.admit([message(), message(), message()])
        const defer = (k: number) =>
          outcome(entries[k]!, { verdict: "defer", after: Duration.zero })
        yield* queue.settle([defer(1)], loose)
        yield* queue.settle([defer(0)], loose)
        const park = { reason: "pay", ref: "o", for: Duration.zero, onExpiry: "late" }
        yield* queue.settle([outcome(entries[2]!, { verdict: "park", park })], loose)
        assert.deepEqual(yield* queue.nextDue, Option.some(0))
        const promoted = [...(yield* queue.promote(1)), ...(yield* queue.promote(9))]
        assert.deepEqual(
          promoted.map((e) => [e.id, e.rev, e.attempts, e.section]),
          [
            [entries[1]!.id, 2, 1, "init"],
            [entries[0]!.id, 2, 1, "init"]
          ]
        )
        const expired = yield* queue.expire(9)
        assert.deepEqual(
          expired.map((e) => [e.id, e.rev, e.section]),
          [[entries[2]!.id, 2, "late"]]
        )
        assert.strictEqual((yield* rowOf(entries[2]!.id))!.state.park_expired, "pay")
      })
    )

    it.effect("counts a flush of statistics once and refuses a second writer", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const stats = Stats.inSection(
          "init",
          Stats.ofRun({ section: "init", result: "pass", micros: 5.5, fused: false })
        )
        const flush = (seq: number) => queue.flushStats(seq, stats, "a")
        assert.strictEqual(yield* queue.lastFlush("a"), 0)
        assert.deepEqual([yield* flush(1), yield* flush(1), yield* flush(2)], [true, false, true])
        assert.strictEqual(yield* queue.lastFlush("a"), 2)
        assert.strictEqual((yield* Effect.flip(flush(9))).reason, "data")
      })
    )

    it.effect("tells a listener", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const next = yield* queue.listen
        yield* queue.notify
        yield* next
      })
    )

    it.effect("lists for operators, in pages, and shows one row by a beginning of its token", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const section = `s${newToken()}`
        const token = newToken()
        const client = { ip: "192.0.2.1", port: 1, helo: "h", proto: "ESMTP", listener: "l" }
        const entries = yield* queue.admit([
          message({ section, token, state: { client, spam: true } }),
          message({ section }),
          message({ section })
        ])
        const list = yield* queue.list({ section, after: entries[0]!.id, limit: 1 })
        assert.deepEqual(
          list.map((l) => l.id),
          [entries[1]!.id]
        )
        assert.deepEqual(yield* queue.list({ section, status: "held", after: 0, limit: 9 }), [])
        const shown = Option.getOrThrow(yield* queue.show(token.slice(0, 20)))
        assert.deepEqual(
          [shown.id, shown.sizeBytes, shown.state, text(shown.headers), shown.dueInSeconds],
          [entries[0]!.id, 24, { spam: true }, "Subject: news\r\n", null]
        )
        assert.deepEqual(yield* queue.show("no such"), Option.none())
        assert.deepEqual(yield* queue.show(""), Option.none())
      })
    )
  })
