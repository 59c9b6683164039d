// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Schema from "effect/Schema"
import * as AuthResults from "../../src/mail/AuthResults.ts"
import * as Header from "../../src/mail/Header.ts"

const id = "mx.ours.example"
const found: AuthResults.Findings = {
  spf: "pass",
  spf_domain: "example.com",
  spf_identity: "mailfrom",
  dkim: [{ d: "example.com", s: "s1", a: "rsa-sha256", result: "pass", b: "Zx81kQ0a" }],
  dmarc: "pass",
  dmarc_policy: "reject",
  arc: "none",
  arc_i: 0,
  from_domain: "example.com"
}

/** A reader of RFC 8601 section 2.2, written apart from the writer. */
const methods = (value: string): ReadonlyArray<string> => {
  const parts: Array<string> = []
  let part = ""
  let isQuoted = false
  let depth = 0
  for (let at = 0; at < value.length; at++) {
    const char = value[at]!
    if (char === "\\" && (isQuoted || depth > 0)) at++
    else if (char === '"' && depth === 0) isQuoted = !isQuoted
    else if (!isQuoted && char === "(") depth++
    else if (!isQuoted && char === ")") depth--
    else if (!isQuoted && depth === 0 && char === ";") {
      parts.push(part)
      part = ""
    } else if (!isQuoted && depth === 0) part += char
  }
  return [...parts, part].map((text) => text.replace(/\s+/g, " ").trim())
}

describe("the field that is written", () => {
  it("looks as the specification shows it", () => {
    assert.strictEqual(
      AuthResults.field(id, found),
      "Authentication-Results: mx.ours.example; spf=pass smtp.mailfrom=example.com;\r\n" +
        " dkim=pass header.d=example.com header.s=s1 header.a=rsa-sha256 header.b=Zx81kQ0a;\r\n" +
        " dmarc=pass (p=reject dis=none) header.from=example.com; arc=none\r\n"
    )
  })

  it("says what a failure comes to, and why a signature does not count", () => {
    const failed = {
      ...found,
      spf: "none",
      spf_domain: null,
      dkim: [
        {
          d: "a.example",
          s: "s",
          a: "rsa-sha256",
          result: "fail",
          reason: "body hash did not verify"
        }
      ],
      dmarc: "fail",
      arc: "pass",
      arc_i: 2
    }
    const value = AuthResults.value(id, { ...failed, spf_identity: "helo" })
    assert.deepStrictEqual(value.split("\r\n"), [
      "mx.ours.example; spf=none;",
      " dkim=fail (body hash did not verify) header.d=a.example header.s=s header.a=rsa-sha256;",
      " dmarc=fail (p=reject dis=reject) header.from=example.com; arc=pass (i=2)"
    ])
  })

  it("R17: a value from the envelope cannot forge a result", () => {
    const forged = [
      "a) dmarc=pass (b",
      "x; dmarc=pass",
      '"; dmarc=pass header.from="bank.example',
      "a\r\nX: y",
      '\\"; dmarc=pass ('
    ]
    for (const text of forged) {
      const value = AuthResults.value(id, {
        ...found,
        spf_domain: text,
        dkim: [{ d: text, s: text, a: text, b: text, result: text, reason: text }],
        dmarc: "fail",
        dmarc_policy: text,
        from_domain: text
      })
      const read = methods(value)
      assert.deepStrictEqual(
        read.map((method) => method.split("=")[0]),
        [id, "spf", "dkim", "dmarc", "arc"],
        text
      )
      assert.match(read[3]!, /^dmarc=fail /)
      assert.notMatch(value, /\r\n(?! )|[^\r]\n|\r(?!\n)/)
    }
  })

  it.prop("keeps its shape for all values", { a: Schema.String, b: Schema.String }, ({ a, b }) => {
    const c = `${b}${a}`
    const value = AuthResults.value(id, {
      ...found,
      spf_domain: a,
      dkim: [
        { d: b, s: c, a, b, result: "pass", reason: c },
        { d: c, s: a, a: b, result: "fail" }
      ],
      from_domain: c
    })
    const names = methods(value).map((method) => method.split("=")[0])
    assert.deepStrictEqual(names, [id, "spf", "dkim", "dkim", "dmarc", "arc"])
    assert.match(value, /^[ -~\r\n]*$/)
    assert.isTrue(value.split("\r\n").every((line) => line.length < 998))
  })
})

describe("fields that claim to be ours", () => {
  const claims = [
    "mx.ours.example; dmarc=pass",
    "MX.Ours.Example; dmarc=pass",
    "(x) mx.ours.example/1; dmarc=pass",
    "mx.ours.example 1; none",
    '"mx.ours.example"; dmarc=pass',
    '"mx.ours\\.example"; dmarc=pass',
    "(a (nested \\) one)) mx.ours.example(b); dmarc=pass",
    "mx.ours.example.; dmarc=pass",
    "  mx.ours.example",
    "(never closed mx.ours.example; dmarc=pass"
  ]
  for (const value of claims)
    it(`R17: ${value}`, () => assert.isTrue(AuthResults.claims(value, id)))

  const foreign = [
    "mx.other.example; dmarc=pass",
    "mx.ours.example.evil.example; dkim=pass",
    "notmx.ours.example; dkim=pass",
    "(mx.ours.example) mx.other.example; dkim=pass",
    "dkim=pass",
    ""
  ]
  for (const value of foreign)
    it(`foreign: ${value}`, () => assert.isFalse(AuthResults.claims(value, id)))

  it("a name in U-labels is the same name", () =>
    assert.isTrue(AuthResults.claims("mx.bücher.example; dkim=pass", "mx.xn--bcher-kva.example")))

  const forged = Header.fromText(
    "Received: from a\r\n" +
      "AUTHENTICATION-RESULTS:\r\n (x)\r\n\tMX.OURS.EXAMPLE;\r\n" +
      " dmarc=pass header.from=bank.example\r\n" +
      "Authentication-Results: mx.other.example; dkim=pass\r\n" +
      "Authentication-Results : mx.ours.example; spf=pass\r\n" +
      "Received-SPF: pass\r\n" +
      "ARC-Authentication-Results: i=1; mx.ours.example; spf=pass\r\n"
  )

  it("R17: are taken out, folded and repeated, and nothing else is", () => {
    const left = AuthResults.withoutClaims(forged, id)
    assert.deepStrictEqual(
      left.fields.map(({ name }) => name),
      ["Received", "Authentication-Results", "Received-SPF", "ARC-Authentication-Results"]
    )
  })

  it("give way to ours on top, and writing it again changes nothing", () => {
    const stamped = AuthResults.stamp(forged, id, found)
    assert.strictEqual(Header.first(stamped, "Authentication-Results")!.split(";")[0], id)
    assert.strictEqual(Header.count(stamped, "Authentication-Results"), 2)
    const sealed = Header.prepend(stamped, "ARC-Seal: i=1\r\n")
    assert.strictEqual(AuthResults.stamp(sealed, id, found), sealed)
  })

  it("are taken out when ours is there too", () => {
    const twice = Header.prepend(
      AuthResults.stamp(forged, id, found),
      "Authentication-Results: mx.ours.example; dmarc=pass\r\n"
    )
    assert.deepStrictEqual(
      AuthResults.stamp(twice, id, found),
      AuthResults.stamp(forged, id, found)
    )
  })
})
