// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Paths and mailboxes of the envelope: what they mean, and that they come back as they went out.
 */
import { assert, describe, it } from "@effect/vitest"
import * as Arbitrary from "effect/Arbitrary"
import * as Result from "effect/Result"
import * as Schema from "effect/Schema"
import * as Address from "../../src/mail/Address.ts"

const path = (text: string) => {
  const read = Address.readPath(text, 0)
  if (Result.isFailure(read)) return read.failure
  const { address, end } = read.success
  return end === text.length ? (address ?? "null") : "trailing"
}

const characters = Array.from('aZ9.+-_!%@<>:,;"\\[] ()éß\u{1F600}=')
const text = Arbitrary.map(
  Arbitrary.array(Arbitrary.schema(Schema.Literals(characters)), { minLength: 1, maxLength: 20 }),
  (all) => all.join("")
)

describe("Address.readPath", () => {
  it("reads the forms of RFC 5321 section 4.1.2", () => {
    assert.strictEqual(path("<>"), "null")
    assert.deepStrictEqual(path("<Dave+x@OURS.Example>"), {
      local: "Dave+x",
      domain: "ours.example"
    })
    assert.deepStrictEqual(path("<a@[192.0.2.1]>"), { local: "a", domain: "[192.0.2.1]" })
    assert.deepStrictEqual(path("<a@[ipv6:2001:db8::1]>"), {
      local: "a",
      domain: "[IPv6:2001:db8::1]"
    })
    assert.deepStrictEqual(path("<@x.example,@y.example:a@b.example>"), {
      local: "a",
      domain: "b.example"
    })
    assert.deepStrictEqual(path("<Postmaster>"), { local: "Postmaster", domain: "" })
    assert.deepStrictEqual(path("<δοκιμή@exämple.org>"), { local: "δοκιμή", domain: "exämple.org" })
  })

  it("R08: the domain is what follows the closing quote", () => {
    const cases: ReadonlyArray<readonly [string, string]> = [
      ['<"a@evil.example> ORCPT=rfc822;x"@example.net>', "a@evil.example> ORCPT=rfc822;x"],
      ['<"u@evil.example x"@example.net>', "u@evil.example x"],
      ['<"a b"@example.net>', "a b"],
      ['<"a\\"b\\\\c"@example.net>', 'a"b\\c'],
      ['<""@example.net>', ""]
    ]
    for (const [given, local] of cases) {
      assert.deepStrictEqual(path(given), { local, domain: "example.net" }, given)
      assert.strictEqual(`<${Address.format({ local, domain: "example.net" })}>`, given)
    }
    assert.strictEqual(
      Address.format({ local: "plain", domain: "example.net" }),
      "plain@example.net"
    )
  })

  it("refuses what the grammar has not", () => {
    const wrong = [
      "",
      "<",
      "a@b.example",
      "<a@b.example",
      "<a@b@c.example>",
      "<@b.example>",
      "<a@>",
      "<a>",
      "<.a@b.example>",
      "<a..b@c.example>",
      "<a.@b.example>",
      "<a@-b.example>",
      "<a@b-.example>",
      "<a@b..example>",
      "<a@b.example.>",
      "<a@b_c.example>",
      '<"a@b.example>',
      '<"a"b@c.example>',
      "<a b@c.example>",
      "<a@[1.2.3]>",
      "<a@[1.2.3.256]>",
      "<a@[IPv6:1::2::3]>",
      "<a@[IPv6:1.2.3.4]>",
      "<a@[x-y:z]>",
      "<a\0@b.example>",
      "<a\r@b.example>",
      '<"a\nb"@c.example>',
      "<a\u200b@b.example>",
      "<a\u202e@b.example>",
      "<a\ufffd@b.example>",
      "<a@ｅｘａｍｐｌｅ.com>",
      `<a@${"b".repeat(64)}.example>`
    ]
    for (const one of wrong) assert.strictEqual(path(one), "syntax", JSON.stringify(one))
  })

  it("bounds the path at 256 octets", () => {
    const fits = `${"l".repeat(242)}@example.com`
    assert.strictEqual(path(`<${fits}>`) === "too long", false)
    assert.strictEqual(path(`<l${fits}>`), "too long")
    assert.strictEqual(path(`<${"é".repeat(122)}@example.com>`), "too long")
  })

  it.prop(
    "what is read is written so that it reads the same again",
    { local: text, name: text },
    ({ local, name }) => {
      for (const given of [
        `<"${local.replace(/[\\"]/g, "\\$&")}"@b.example>`,
        `<${local}@${name}>`,
        `<${local}@b.example>`
      ]) {
        const read = Address.readPath(given, 0)
        if (Result.isFailure(read) || read.success.address === undefined) continue
        const { address } = read.success
        assert.deepStrictEqual(Address.parse(Address.format(address)), address)
        assert.deepStrictEqual(path(`<${Address.format(address)}>`), address)
      }
    }
  )

  it.prop("a quoted local part never moves the domain", { local: text }, ({ local }) => {
    const given = `<"${local.replace(/[\\"]/g, "\\$&")}"@b.example>`
    assert.deepStrictEqual(path(given), { local, domain: "b.example" })
  })
})

describe("Address", () => {
  it("compares domains in A-labels", () => {
    assert.strictEqual(Address.domainToAscii("BÜCHER.example"), "xn--bcher-kva.example")
    assert.strictEqual(Address.domainToAscii("Example.ORG"), "example.org")
    assert.strictEqual(Address.domainToAscii("１２７.0.0.1"), undefined)
  })

  it("parses a whole text or nothing", () => {
    assert.deepStrictEqual(Address.parse("a@b.example"), { local: "a", domain: "b.example" })
    for (const wrong of ["a@b.example ", "<a@b.example>", "postmaster", "a@b.example\r\nDATA"]) {
      assert.strictEqual(Address.parse(wrong), undefined)
    }
  })

  it("divides a detail from a name", () => {
    assert.deepStrictEqual(Address.splitDetail("dave+lists+x", "+"), {
      name: "dave",
      detail: "lists+x"
    })
    assert.deepStrictEqual(Address.splitDetail("dave", "+"), { name: "dave", detail: undefined })
    assert.deepStrictEqual(Address.splitDetail("+dave", "+"), { name: "+dave", detail: undefined })
    assert.deepStrictEqual(Address.splitDetail("dave+x", ""), { name: "dave+x", detail: undefined })
  })
})
