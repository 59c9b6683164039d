// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Result from "effect/Result"
import * as Schema from "effect/Schema"
import * as Author from "../../src/mail/Author.ts"
import * as Header from "../../src/mail/Header.ts"
import * as Mails from "../support/Mails.ts"
import cases from "../vectors/from/cases.json" with { type: "json" }

const read = (...fields: ReadonlyArray<string>) =>
  Result.merge(Author.domain(Header.fromText(fields.map((field) => `${field}\r\n`).join(""))))

describe("the author's domain", () => {
  const right: ReadonlyArray<readonly [string, string]> = [
    ["u@a.example", "a.example"],
    ["<u@a.example>", "a.example"],
    ["Ann <u@A.Example>", "a.example"],
    ['"Ann, B. <x@y>" <u@a.example>', "a.example"],
    ["Ann Q. Public <u@a.example>", "a.example"],
    ["[Jira] (bot) Ann <u@a.example>", "a.example"],
    ["u@a.example (Ann (of <b@c.example>))", "a.example"],
    ["=?utf-8?q?b=40c.example?= <u@a.example>", "a.example"],
    ['"u@b.example"@a.example', "a.example"],
    ["Ann\r\n <u@a.example>", "a.example"],
    ["u@a.example, v@A.EXAMPLE,", "a.example"],
    ["Us: u@a.example, Ann <v@a.example>;", "a.example"],
    ["Doe, Ann <u@a.example>", "a.example"],
    ["Änn <ü@bücher.example>", "xn--bcher-kva.example"],
    ["u@xn--bcher-kva.example, v@bücher.example", "xn--bcher-kva.example"]
  ]
  for (const [value, domain] of right)
    it(`${value} is of ${domain}`, () => assert.strictEqual(read(`From: ${value}`), domain))

  const malformed = [
    "",
    "Ann",
    "u@a.example; v@a.example",
    "b@c.example <u@a.example>",
    "u@a.example <v@a.example>",
    "<u@a.example> <v@a.example>",
    "<<u@a.example>>",
    "u@b@a.example",
    "u@a .example",
    "u@a\r\n .example",
    "u@a(x).example",
    "u @a.example",
    "u@a.example.",
    "u@[192.0.2.1]",
    "<@relay.example:u@a.example>",
    "u@bank.example .a.example",
    "u@bank.example(x).a.example",
    '"Ann <u@a.example>',
    "Ann (x <u@a.example>",
    "u@a.example\0",
    "u@a..example",
    "Us: u@a.example",
    "undisclosed:;",
    ": u@a.example;",
    "A: B: u@a.example;;",
    "u@",
    "@a.example",
    "u@a.example x"
  ]
  for (const value of malformed) {
    it(`${JSON.stringify(value)} has no author`, () =>
      assert.strictEqual(read(`From: ${value}`), "malformed From"))
  }

  it("is one of one field (R22)", () => {
    assert.strictEqual(read("To: x@y.example"), "no From")
    assert.strictEqual(read("From: u@a.example", "from : u@a.example"), "more than one From")
    assert.strictEqual(read("From: u@a.example, v@b.example"), "several author domains")
    assert.strictEqual(read("Resent-From: v@b.example", "From: u@a.example"), "a.example")
  })

  for (const { authors, id, message, why } of cases) {
    it(`${id}: ${why}`, () => {
      const found = Author.domain(Mails.message(Buffer.from(message, "latin1")).header)
      const domains = [
        ...new Set(authors.map((author) => author.slice(author.lastIndexOf("@") + 1)))
      ]
      // Stricter than a careful reader, never of another opinion.
      if (Result.isSuccess(found))
        assert.deepStrictEqual(
          [found.success],
          domains.map((domain) => new URL(`http://${domain}`).hostname)
        )
    })
  }

  it.prop("never comes from a name, a comment or a quoted string", [Schema.String], ([text]) => {
    const quoted = text.replace(/["\\]|\p{Cc}/gu, "")
    const result = read(`From: "${quoted} <x@bank.example>" (x@bank.example) <u@a.example>`)
    assert.include(["a.example", "malformed From"], result)
  })

  it.prop("is a domain name or a refusal, whatever the field holds", [Schema.String], ([text]) => {
    const result = Author.domain({ ...Header.fromText(`From: ${text.replace(/[\r\n]/g, "")}\r\n`) })
    if (Result.isSuccess(result)) assert.match(result.success, /^[a-z0-9.-]+$/)
  })
})
