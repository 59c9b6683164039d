// SPDX-License-Identifier: AGPL-3.0-or-later
/** Reading a message after DATA: octet by octet as it was sent, one true end, bounded memory. */
import { assert, describe, it } from "@effect/vitest"
import { readFileSync } from "node:fs"
import * as Arbitrary from "effect/Arbitrary"
import * as Schema from "effect/Schema"
import * as SmtpData from "../../src/mail/SmtpData.ts"

const limits: SmtpData.Limits = { sizeBytes: 10_000, lineBytes: 1000 }

const makeBudget = (bytes = 1_000_000) => {
  const budget = {
    free: bytes,
    reserve: (wanted: number) => wanted <= budget.free && ((budget.free -= wanted), true),
    release: (given: number) => void (budget.free += given)
  }
  return budget
}

/** Feeds segments; gives what was read and what is left behind the end. */
const read = (segments: ReadonlyArray<Uint8Array>, budget = makeBudget()) => {
  const incoming = SmtpData.make(limits, budget)
  for (const [i, segment] of segments.entries()) {
    const end = incoming.push(segment)
    if (end === undefined) continue
    const rest = Buffer.concat([segment.subarray(end), ...segments.slice(i + 1)]).toString("latin1")
    return {
      fault: incoming.fault(),
      octets: Buffer.from(incoming.octets()).toString("latin1"),
      rest
    }
  }
  return { fault: incoming.fault(), octets: undefined, rest: "" }
}

const octets = (text: string) => Buffer.from(text, "latin1")

/** RFC 5321 section 4.5.2, the sending side. */
const stuff = (message: string) => `${message.replace(/^\./gm, "..")}.\r\n`

const line = Arbitrary.map(
  Arbitrary.array(
    Arbitrary.schema(Schema.Literals([".", "..", "a", "\xff\x80", " ", "MAIL FROM:<x@y>"])),
    { maxLength: 4 }
  ),
  (all) => all.join("")
)
const message = Arbitrary.map(Arbitrary.array(line, { maxLength: 8 }), (lines) =>
  lines.map((l) => `${l}\r\n`).join("")
)
const cuts = Schema.Array(Schema.Int.check(Schema.isBetween({ minimum: 1, maximum: 7 })))

const cut = (all: Buffer, sizes: ReadonlyArray<number>): ReadonlyArray<Buffer> => {
  const parts: Array<Buffer> = []
  let at = 0
  for (let i = 0; at < all.length; i++) {
    const size = sizes[i] ?? all.length
    parts.push(all.subarray(at, at + size))
    at += size
  }
  return parts
}

describe("SmtpData", () => {
  it.prop(
    "gives back every octet that was sent, however it was cut",
    { message, cuts, rest: Schema.Literals(["", "QUIT\r\n", ".\r\n"]) },
    ({ cuts, message, rest }) => {
      assert.deepStrictEqual(read(cut(octets(stuff(message) + rest), cuts)), {
        fault: undefined,
        octets: message,
        rest
      })
    }
  )

  it("R04: dots, 8-bit octets and the end survive a cut at every offset", () => {
    const message = "..x\r\n.\xe9\r\n\r\n.\r\n...\r\nb.\r\n.\r\n"
    const sent = octets(`${stuff(message)}NOOP\r\n`)
    for (let at = 0; at <= sent.length; at++) {
      for (const parts of [
        [sent.subarray(0, at), sent.subarray(at)],
        [sent.subarray(0, at), ...cut(sent.subarray(at), [1, 1, 1])]
      ]) {
        assert.deepStrictEqual(
          read(parts),
          { fault: undefined, octets: message, rest: "NOOP\r\n" },
          String(at)
        )
      }
    }
  })

  it("takes a dot away that no sender should have left alone (RFC 5321 section 4.5.2)", () => {
    assert.strictEqual(read([octets(".x\r\n.\r\n")]).octets, "x\r\n")
  })

  const vectors = JSON.parse(
    readFileSync(new URL("../vectors/smtp/dialogues.json", import.meta.url), "utf8")
  ) as {
    readonly smuggling: ReadonlyArray<{ readonly id: string; readonly data: string }>
  }
  // Look-alikes made of other characters are text to everybody and hold no bare CR or LF.
  const harmless = ["smuggle-vt", "smuggle-ff", "smuggle-nel", "smuggle-utf8-ls"]
  for (const { data, id } of vectors.smuggling) {
    it(`A-ING-3 R04: ${id} ends nothing and is never two messages`, () => {
      for (const sizes of [
        [],
        [1, 2, 3, 1, 1, 1, 1, 1],
        Array.from({ length: data.length }, () => 1)
      ]) {
        const got = read(cut(Buffer.from(data), sizes))
        assert.strictEqual(got.rest, "", id)
        assert.isDefined(got.octets)
        if (harmless.includes(id)) assert.include(got.octets, "smuggled")
        else assert.include(["bare newline", "nul"], got.fault)
      }
    })
  }

  it("keeps looking for the true end after a fault", () => {
    const got = read(["a\0b\r\n", "x\n.\n", "\r\n.", "\r\n", "QUIT\r\n"].map(octets))
    assert.deepStrictEqual(got, { fault: "nul", octets: "", rest: "QUIT\r\n" })
  })

  it("R05: counts octets without the added dots, to the octet", () => {
    const lines = "..0123456789\r\n".repeat(714)
    const exact = `${lines}${"x".repeat(limits.sizeBytes - lines.length - 2)}\r\n`
    assert.strictEqual(exact.length, limits.sizeBytes)
    assert.deepStrictEqual(read([octets(stuff(exact))]), {
      fault: undefined,
      octets: exact,
      rest: ""
    })
    assert.strictEqual(read([octets(stuff(`y${exact}`))]).fault, "size")
  })

  it("refuses a line that is too long, and only that", () => {
    const fits = `${"x".repeat(limits.lineBytes)}\r\n`
    assert.strictEqual(read([octets(stuff(fits + fits))]).fault, undefined)
    assert.strictEqual(read(cut(octets(stuff(`x${fits}`)), [500, 500, 1, 1])).fault, "line")
  })

  it("holds no memory for what it will not take, and gives all of it back", () => {
    const budget = makeBudget()
    const incoming = SmtpData.make(limits, budget)
    incoming.push(Buffer.alloc(limits.sizeBytes / 2, "abc\r\n"))
    assert.isBelow(budget.free, 1_000_000)
    for (let i = 0; i < 100; i++) incoming.push(Buffer.alloc(1000, "abc\r\n"))
    assert.strictEqual(incoming.fault(), "size")
    assert.strictEqual(budget.free, 1_000_000)
    incoming.dispose()
    incoming.dispose()
    assert.strictEqual(budget.free, 1_000_000)
  })

  it("a large message holds little more than has come of it", () => {
    const budget = makeBudget(100_000_000)
    const large = SmtpData.make({ sizeBytes: 50_000_000, lineBytes: 1000 }, budget)
    const segment = Buffer.alloc(65_536, `${"x".repeat(62)}\r\n`)
    for (let bytes = segment.length; bytes < 40_000_000; bytes += segment.length) {
      large.push(segment)
      const heldBytes = 100_000_000 - budget.free
      const most = bytes <= 8 * 1024 * 1024 ? 2 * bytes : 1.25 * bytes + segment.length
      assert.isAtMost(heldBytes, most, `held of ${bytes}`)
    }
    assert.isUndefined(large.fault())
  })

  it("says so when there is no memory", () => {
    const budget = makeBudget(1024)
    assert.strictEqual(read([octets(stuff("x\r\n"))], budget).fault, undefined)
    assert.strictEqual(read([octets(stuff("x\r\n"))], budget).fault, "memory")
  })
})
