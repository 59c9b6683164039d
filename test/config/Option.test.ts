// SPDX-License-Identifier: AGPL-3.0-or-later
/** The kinds of options: which texts they take, and as what. */
import { assert, describe, it } from "@effect/vitest"
import * as Duration from "effect/Duration"
import * as Result from "effect/Result"
import * as Option from "../../src/config/Option.ts"

const reads = <A>(option: Option.Option<A>, text: string): A | undefined =>
  Result.getOrElse(option.read(text), () => undefined)

const doc = "d"

describe("Option.duration", () => {
  it.each([
    ["30 s", 30_000],
    ["30s", 30_000],
    ["5m", 300_000], // minutes
    ["1 h 30 min", 5_400_000],
    ["2 weeks", 1_209_600_000],
    ["1 MONTH", 2_592_000_000],
    ["1 year", 31_536_000_000],
    ["500 us", 0.5],
    ["0 s", 0],
    ["forever", Number.POSITIVE_INFINITY]
  ])("reads %s", (text, millis) => {
    assert.strictEqual(Duration.toMillis(reads(Option.duration({ doc }), text)!), millis)
  })

  it.each(["", "30", "30sec", "s", "-1 s", "1.5 h", "5 constructor", "200 years", "1 s,"])(
    "refuses %j",
    (text) => {
      assert.strictEqual(reads(Option.duration({ doc }), text), undefined)
    }
  )

  it("holds bounds, both included, and then refuses forever", () => {
    const bounded = Option.duration({ doc, between: ["1 s", "1 min"] })
    assert.strictEqual(bounded.type, "a duration from 1 s to 1 min")
    assert.deepStrictEqual(
      ["999 ms", "1 s", "60 s", "61 s", "forever"].map(
        (text) => reads(bounded, text) !== undefined
      ),
      [false, true, true, false, false]
    )
  })

  it("does not slow down on a long text that is wrong at its end", () => {
    assert.strictEqual(reads(Option.duration({ doc }), "1 s ".repeat(15_000) + "!"), undefined)
  })
})

describe("Option.size", () => {
  it.each([
    ["10M", 10 * 1024 ** 2],
    ["10 MiB", 10 * 1024 ** 2],
    ["10 MB", 10_000_000],
    ["64K", 65_536],
    ["1 GiB", 1024 ** 3],
    ["7", 7]
  ])("reads %s", (text, bytes) => {
    assert.strictEqual(reads(Option.size({ doc }), text), bytes)
  })

  it.each(["", "M", "1.5M", "10 X", "-1", "999999999999 GiB", "1 constructor"])(
    "refuses %j",
    (text) => {
      assert.strictEqual(reads(Option.size({ doc }), text), undefined)
    }
  )
})

describe("Option.domain", () => {
  it("reads a name in any case", () => {
    assert.strictEqual(reads(Option.domain({ doc }), "Mail.Example.ORG"), "mail.example.org")
    assert.strictEqual(
      reads(Option.domain({ doc }), "xn--nxasmq6b.example"),
      "xn--nxasmq6b.example"
    )
  })

  it.each([
    "$myhostname",
    "localhost",
    "localhost.localdomain",
    "mail",
    "",
    "mail.example.org.",
    "a..b",
    "-a.example",
    "a-.example",
    "a b.example",
    "192.0.2.1",
    "h.example\r\nRCPT TO:<e@example.org>",
    `${"a".repeat(64)}.example`,
    `${"a.".repeat(130)}example`,
    "bücher.example",
    "_dmarc.example"
  ])("R67: %j is not taken for the name of a host", (text) => {
    assert.strictEqual(reads(Option.domain({ doc }), text), undefined)
  })

  it("says how a name beyond ASCII is written", () => {
    assert.deepStrictEqual(
      Option.domain({ doc }).read("bücher.example"),
      Result.fail("write its ASCII form, which begins with xn--")
    )
  })
})

describe("the other kinds", () => {
  it("yesNo takes yes and no in any case", () => {
    assert.deepStrictEqual(
      ["YES", "no", "true"].map((text) => reads(Option.yesNo({ doc }), text)),
      [true, false, undefined]
    )
  })

  it("int takes whole numbers between its bounds", () => {
    const port = Option.int({ doc, min: 1, max: 65535 })
    assert.deepStrictEqual(
      ["0", "1", "65535", "65536", "1e3", "+1", ""].map((text) => reads(port, text)),
      [undefined, 1, 65535, undefined, undefined, undefined, undefined]
    )
  })

  it("list takes words between blanks", () => {
    assert.deepStrictEqual(reads(Option.list({ doc }), " a  b\tc "), ["a", "b", "c"])
    assert.deepStrictEqual(reads(Option.list({ doc }), ""), [])
  })

  it("listOf names the word that is wrong", () => {
    const domains = Option.listOf("domain names", Option.domain({ doc }), { doc })
    assert.deepStrictEqual(reads(domains, "a.example B.example"), ["a.example", "b.example"])
    assert.deepStrictEqual(
      domains.read("a.example mail"),
      Result.fail("'mail' is not a domain name: it has no dot")
    )
  })

  it("optional takes the empty text for undefined and knows no target then", () => {
    const next = Option.optional(Option.section({ doc }))
    assert.deepStrictEqual(next.read(""), Result.succeed(undefined))
    assert.deepStrictEqual(next.targets!(undefined as never), [])
    assert.deepStrictEqual(next.targets!("local" as never), ["local"])
  })

  it("numbered gathers the targets of all", () => {
    const ways = Option.numbered(Option.section({ doc }), 3)
    assert.deepStrictEqual(ways.read("Local"), Result.succeed(["local"]))
    assert.deepStrictEqual(ways.targets!(["a", "b"] as never), ["a", "b"])
  })

  it("shows a right example for each kind", () => {
    const kinds = [
      Option.text({ doc }),
      Option.yesNo({ doc }),
      Option.int({ doc, min: 2, max: 3 }),
      Option.choice(["a", "b"], { doc }),
      Option.list({ doc }),
      Option.duration({ doc }),
      Option.size({ doc }),
      Option.section({ doc }),
      Option.file({ doc }),
      Option.domain({ doc })
    ]
    for (const kind of kinds) assert.isDefined(reads<unknown>(kind, kind.example), kind.type)
  })
})
