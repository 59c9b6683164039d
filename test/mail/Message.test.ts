// SPDX-License-Identifier: AGPL-3.0-or-later
/** What the columns of a row say about a message, and who a message says it is from. */
import { assert, describe, it } from "@effect/vitest"
import { readFileSync } from "node:fs"
import * as Schema from "effect/Schema"
import * as Address from "../../src/mail/Address.ts"
import * as Header from "../../src/mail/Header.ts"
import * as Mailboxes from "../../src/mail/Mailboxes.ts"
import * as Message from "../../src/mail/Message.ts"

const summary = (text: string) => Message.summarize(Header.parse(Buffer.from(text, "latin1")))
const authors = (value: string) => Mailboxes.parse(value).map(Address.format)

const vectors = JSON.parse(
  readFileSync(new URL("../vectors/smtp/from.json", import.meta.url), "utf8")
) as ReadonlyArray<{
  readonly id: string
  readonly header: string
  readonly authors: ReadonlyArray<string>
}>

describe("Mailboxes.parse", () => {
  for (const { authors: want, header, id } of vectors) {
    it(`sees the authors of ${id}`, () => {
      const from = Header.first(Header.fromText(header), "From")
      // RFC 5322 section 3.4.1 has no dot behind a domain: no author a strict reader would be sure of.
      assert.deepStrictEqual(
        from === undefined ? [] : authors(from),
        id === "trailing-dot" ? [] : want
      )
    })
  }

  it("R10: divides first and decodes after", () => {
    for (const one of [
      "Doe, Jane <jane@example.org>",
      "=?utf-8?Q?Doe=2C_Jane?= <jane@example.org>",
      '"Doe, Jane" <jane@example.org>'
    ]) {
      assert.deepStrictEqual(authors(one), ["jane@example.org"], one)
    }
    assert.deepStrictEqual(authors("jane@example.org, <jane@evil.example>"), [
      "jane@example.org",
      "jane@evil.example"
    ])
    assert.deepStrictEqual(authors("x:a@example.org,b@evil.example;"), [
      "a@example.org",
      "b@evil.example"
    ])
    assert.deepStrictEqual(authors("undisclosed-recipients:;"), [])
    assert.deepStrictEqual(authors(",a@b.example,,"), ["a@b.example"])
  })

  it("is sure of nobody in what is malformed anywhere", () => {
    for (const wrong of [
      "a@b.example, Doe",
      "a@b.example <",
      "<a@b.example",
      "a@b.example>",
      "(a",
      '"a',
      "x: a@b.example",
      "<>",
      "a@b.example c@d.example",
      "a:b:c@d.example;;"
    ]) {
      assert.deepStrictEqual(authors(wrong), [], wrong)
    }
  })

  it.prop("is total", { value: Schema.String }, ({ value }) => {
    for (const one of authors(value)) assert.isDefined(Address.parse(one))
  })

  it("reads a long hostile value at once", () => {
    for (const part of ["(", "<", '"', "a,", "a@b.example,", "a:", ".", "[", "\\", "a "]) {
      const started = process.hrtime.bigint()
      authors(part.repeat(100_000))
      assert.isBelow(Number(process.hrtime.bigint() - started) / 1e6, 1000, part)
    }
  })
})

describe("Message.summarize", () => {
  it("fills the columns", () => {
    assert.deepStrictEqual(
      summary(
        "From: =?utf-8?q?J=C3=B6rg?= <Jorg@Example.ORG>\r\nSubject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=\r\n =?utf-8?q?_an?= alle\r\n" +
          "message-id:\r\n <AbC@x.example>\r\nList-Id: The List <The.List.example.org>\r\n"
      ),
      {
        fromHeader: "Jorg@example.org",
        subject: "Grüße an alle",
        messageId: "<AbC@x.example>",
        listId: "the.list.example.org"
      }
    )
    assert.deepStrictEqual(summary("X: y\r\n"), {
      fromHeader: null,
      subject: null,
      messageId: null,
      listId: null
    })
  })

  it("R14: no NUL and no broken character reaches a column", () => {
    assert.strictEqual(summary("Subject: a\0b\r\n").subject, "ab")
    assert.strictEqual(
      summary("Subject: =?utf-8?Q?a=00b=0D=0ABcc:_x@y?=\r\n").subject,
      "ab  Bcc: x@y"
    )
    assert.strictEqual(summary("Subject: a\xe9b\r\n").subject, "a\ufffdb")
    assert.strictEqual(summary('From: "\xe9" <a@example.org>\r\n').fromHeader, "a@example.org")
    assert.strictEqual(summary("Subject: =?utf-16be?B?2AA=?=\r\n").subject, "\ufffd")
  })

  it("cuts a subject after 998 characters and no character in two", () => {
    assert.strictEqual(Array.from(summary(`Subject: ${"a".repeat(2000)}\r\n`).subject!).length, 998)
    const faces = Buffer.from("\u{1F600}".repeat(1200)).toString("base64")
    const { subject } = summary(`Subject: =?utf-8?b?${faces}?=\r\n`)
    assert.strictEqual(subject, "\u{1F600}".repeat(998))
  })
})

const parts = (text: string) => {
  const { body, header } = Message.split(Buffer.from(text))
  return [Buffer.from(header).toString(), Buffer.from(body).toString()]
}

describe("Message.split", () => {
  it("divides at the empty line, or where the header ends by itself", () => {
    assert.deepStrictEqual(parts("A: b\r\n\r\nbody\r\n"), ["A: b\r\n", "body\r\n"])
    assert.deepStrictEqual(parts("A: b\r\n"), ["A: b\r\n", ""])
    assert.deepStrictEqual(parts("A: b\r\nno field\r\n\r\nx\r\n"), [
      "A: b\r\n",
      "no field\r\n\r\nx\r\n"
    ])
    assert.deepStrictEqual(parts("no field\r\n"), ["", "no field\r\n"])
    assert.deepStrictEqual(parts(" hidden: x\r\nA: b\r\n"), ["", " hidden: x\r\nA: b\r\n"])
    assert.deepStrictEqual(parts("\r\nx\r\n"), ["", "x\r\n"])
    assert.deepStrictEqual(parts(""), ["", ""])
  })

  it("looks no further than it was told, and finds the same within", () => {
    const header = "A: b\r\n".repeat(10)
    const split = (most: number) => Message.split(Buffer.from(`${header}\r\nx\r\n`), most)
    assert.strictEqual(split(60).header.length, 60)
    assert.strictEqual(Buffer.from(split(60).body).toString(), "x\r\n")
    for (const most of [59, 54, 31, 30]) {
      const { length } = split(most).header
      assert.isAbove(length, most)
      assert.isAtMost(length, most + 6)
    }
  })
})
