// SPDX-License-Identifier: AGPL-3.0-or-later
/** Encoded words; the examples are those of RFC 2047 section 8. */
import { assert, describe, it } from "@effect/vitest"
import * as Arbitrary from "effect/Arbitrary"
import * as Schema from "effect/Schema"
import * as EncodedWord from "../../src/mail/EncodedWord.ts"

const hostile = Arbitrary.map(
  Arbitrary.array(
    Arbitrary.schema(
      Schema.Literals([
        "=?",
        "?=",
        "?q?",
        "?b?",
        "utf-8",
        "=",
        "3D",
        " ",
        "é",
        "_",
        "=?utf-8?q?=C3?=",
        "x"
      ])
    ),
    { maxLength: 40 }
  ),
  (all) => all.join("")
)

describe("EncodedWord.decode", () => {
  const cases: ReadonlyArray<readonly [given: string, want: string]> = [
    ["=?ISO-8859-1?Q?a?=", "a"],
    ["=?ISO-8859-1?Q?a?= b", "a b"],
    ["=?ISO-8859-1?Q?a?= =?ISO-8859-1?Q?b?=", "ab"],
    ["=?ISO-8859-1?Q?a?=  =?ISO-8859-1?Q?b?=", "ab"],
    ["=?ISO-8859-1?Q?a_b?=", "a b"],
    ["=?ISO-8859-1?Q?a?= =?ISO-8859-2?Q?_b?=", "a b"],
    ["=?US-ASCII?Q?Keith_Moore?=", "Keith Moore"],
    [
      "=?ISO-8859-1?B?SWYgeW91IGNhbiByZWFkIHRoaXMgeW8=?= =?ISO-8859-2?B?dSB1bmRlcnN0YW5kIHRoZSBleGFtcGxlLg==?=",
      "If you can read this you understand the example."
    ],
    ["=?US-ASCII*EN?Q?Keith_Moore?=", "Keith Moore"],
    ["=?utf-8?q?h=C3?= =?UTF-8?b?qQ==?=", "hé"],
    ["=?gb2312?B?xOO6ww==?=", "你好"],
    ["=?utf-8?q?=E9?= x", "\ufffd x"],
    ["=?x-none?q?a?= =?utf-8?q?b?= c", "=?x-none?q?a?= b c"],
    ["=?utf-8?q?a?= =?x-none?q?b?=", "a =?x-none?q?b?="],
    ["a=?utf-8?q?=3d=ZZ?=b", "a==ZZb"],
    ["=?utf-8?x?a?=", "=?utf-8?x?a?="],
    ["plain = text ?=", "plain = text ?="]
  ]
  for (const [given, want] of cases) {
    it(`reads ${given}`, () => assert.strictEqual(EncodedWord.decode(given), want))
  }

  it.prop("is total and bounded", { text: hostile }, ({ text }) => {
    assert.isAtMost(EncodedWord.decode(text).length, text.length * 3)
  })

  it("reads a long hostile text at once", () => {
    for (const part of ["=?", "=?a", "=?utf-8?q?", "=?utf-8?q?a?= ", "=?utf-8?q?=C3?= "]) {
      const started = process.hrtime.bigint()
      EncodedWord.decode(part.repeat(100_000))
      assert.isBelow(Number(process.hrtime.bigint() - started) / 1e6, 500, part)
    }
  })
})
