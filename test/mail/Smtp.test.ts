// SPDX-License-Identifier: AGPL-3.0-or-later
/** MAIL and RCPT as they are written, and the reply to what is wrong with them. */
import { assert, describe, it } from "@effect/vitest"
import { readFileSync } from "node:fs"
import * as Result from "effect/Result"
import * as Schema from "effect/Schema"
import * as Smtp from "../../src/mail/Smtp.ts"
import * as Transaction from "../../src/mail/Transaction.ts"

const shown = (result: Result.Result<unknown, Smtp.Reply>): string =>
  Result.isSuccess(result) ? "ok" : `${result.failure.code} ${result.failure.status}`
const mail = (line: string) => shown(Smtp.parseMail(Buffer.from(line)))
const rcpt = (line: string, smtputf8 = false) => shown(Smtp.parseRcpt(Buffer.from(line), smtputf8))

const vectors = JSON.parse(
  readFileSync(new URL("../vectors/smtp/dialogues.json", import.meta.url), "utf8")
) as {
  readonly mail: ReadonlyArray<{ readonly id: string; readonly hex: string; readonly want: string }>
}

const limits: Transaction.Limits = { messageBytes: 100_000, recipients: 3, freeBytes: 1_000_000 }

describe("Smtp.parseMail", () => {
  for (const { hex, id, want } of vectors.mail) {
    it(`answers ${id} with ${want}`, () => {
      const line = Buffer.from(
        Buffer.from(hex, "hex").toString("latin1").replace(/\r\n$/, ""),
        "latin1"
      )
      const begun = Transaction.begin(Transaction.empty, line, limits)
      const code = Result.isSuccess(begun) ? "250" : String(begun.failure.code)
      assert.match(code, new RegExp(`^${want}`))
    })
  }

  it("reads every parameter", () => {
    const read = Smtp.parseMail(
      Buffer.from("mail from:<jörg@b.example> smtputf8 SIZE=12 body=8bitmime  ")
    )
    assert.deepStrictEqual(Result.getOrThrow(read), {
      sender: { local: "jörg", domain: "b.example" },
      sizeBytes: 12,
      body: "8BITMIME",
      smtputf8: true
    })
  })

  it("says what is wrong", () => {
    assert.strictEqual(mail("MAIL FROM:<a@b.example> FOO=bar"), "555 5.5.4")
    assert.strictEqual(mail("MAIL FROM:<a@b.example> x"), "555 5.5.4")
    assert.strictEqual(mail("MAIL FROM:<a@b.example> BODY=BINARYMIME"), "555 5.5.4")
    assert.strictEqual(mail("MAIL FROM:<a@b.example> BODY=x"), "501 5.5.4")
    assert.strictEqual(mail("MAIL FROM:<a@b.example> SIZE="), "501 5.5.4")
    assert.strictEqual(mail("MAIL FROM:<a@b.example> SIZE=1 SIZE=1"), "501 5.5.4")
    assert.strictEqual(mail("MAIL FROM:<a@b.example>SIZE=1"), "501 5.5.4")
    assert.strictEqual(mail("MAIL FROM:<a@b.example> SMTPUTF8=1"), "501 5.5.4")
    assert.strictEqual(mail("MAIL <a@b.example>"), "501 5.5.4")
    assert.strictEqual(mail("MAIL FROM:<a@b..example>"), "501 5.1.7")
    assert.strictEqual(mail("MAIL FROM:<postmaster>"), "501 5.1.7")
  })

  it("R47: an address beyond ASCII needs SMTPUTF8, its domain alone as well", () => {
    assert.strictEqual(mail("MAIL FROM:<jörg@ours.example>"), "550 5.6.7")
    assert.strictEqual(mail("MAIL FROM:<info@exämple.org>"), "550 5.6.7")
    assert.strictEqual(rcpt("RCPT TO:<δοκιμή@example.net>"), "553 5.6.7")
    assert.strictEqual(rcpt("RCPT TO:<δοκιμή@example.net>", true), "ok")
  })
})

describe("Smtp.parseRcpt", () => {
  it("R08: takes a quoted recipient whole or not at all", () => {
    const read = Smtp.parseRcpt(
      Buffer.from('RCPT TO:<"a@evil.example> ORCPT=rfc822;x"@example.net>'),
      false
    )
    assert.deepStrictEqual(Result.getOrThrow(read), {
      local: "a@evil.example> ORCPT=rfc822;x",
      domain: "example.net"
    })
    assert.strictEqual(rcpt('RCPT TO:<"a@evil.example>'), "501 5.1.3")
  })

  it("says what is wrong", () => {
    assert.strictEqual(rcpt("RCPT TO:<>"), "501 5.1.3")
    assert.strictEqual(rcpt("RCPT TO:<a@b.example> NOTIFY=NEVER"), "555 5.5.4")
    assert.strictEqual(rcpt("RCPT TO:a@b.example"), "501 5.1.3")
    assert.strictEqual(rcpt("RCPT TO:<PostMaster>"), "ok")
  })
})

const sized = (size: number, freeBytes = 1_000_000) =>
  shown(
    Transaction.begin(Transaction.empty, Buffer.from(`MAIL FROM:<> SIZE=${size}`), {
      ...limits,
      freeBytes
    })
  )

const protocol = (isExtended: boolean, isSecure: boolean, smtputf8: boolean) =>
  Smtp.protocol({ isExtended, isSecure, smtputf8 })

const step = (transaction: Transaction.Transaction, line: string): Transaction.Transaction => {
  const octets = Buffer.from(line)
  if (line === "RSET") return Transaction.empty
  if (line.startsWith("MAIL"))
    return Result.getOrElse(Transaction.begin(transaction, octets, limits), () => transaction)
  const wanted = Transaction.recipient(transaction, octets, limits)
  return Result.isSuccess(wanted) ? Transaction.accept(transaction, wanted.success) : transaction
}

describe("Transaction", () => {
  const line = Schema.Literals([
    "RSET",
    "MAIL FROM:<s1@a.example>",
    "MAIL FROM:<s2@a.example>",
    "MAIL FROM:<bad",
    "RCPT TO:<r1@b.example>",
    "RCPT TO:<r2@b.example>",
    "RCPT TO:<r3@b.example>",
    "RCPT TO:<r4@b.example>",
    "RCPT TO:<R1@B.EXAMPLE>",
    "RCPT TO:<bad"
  ])

  it.prop(
    "keeps nothing of an earlier transaction, no recipient twice, and its bound",
    {
      before: Schema.Array(line),
      after: Schema.Array(line)
    },
    ({ after, before }) => {
      const fresh = after.reduce(step, Transaction.empty)
      assert.deepStrictEqual([...before, "RSET", ...after].reduce(step, Transaction.empty), fresh)
      const seen = fresh.recipients.map(({ local }) => local)
      assert.strictEqual(new Set(seen).size, seen.length)
      assert.isAtMost(seen.length, limits.recipients)
      if (fresh.mail === undefined) assert.deepStrictEqual(fresh.recipients, [])
    }
  )

  it("answers commands out of order", () => {
    const begun = Result.getOrThrow(
      Transaction.begin(Transaction.empty, Buffer.from("MAIL FROM:<>"), limits)
    )
    assert.strictEqual(
      shown(Transaction.begin(begun, Buffer.from("MAIL FROM:<>"), limits)),
      "503 5.5.1"
    )
    assert.strictEqual(
      shown(Transaction.recipient(Transaction.empty, Buffer.from("RCPT TO:<a@b.example>"), limits)),
      "503 5.5.1"
    )
    assert.strictEqual(
      shown(Transaction.data(Transaction.empty, Buffer.from("DATA"), limits)),
      "503 5.5.1"
    )
    assert.strictEqual(shown(Transaction.data(begun, Buffer.from("DATA"), limits)), "554 5.5.1")
  })

  it("refuses a declared size before the message is sent", () => {
    assert.strictEqual(sized(100_000), "ok")
    assert.strictEqual(sized(100_001), "552 5.3.4")
    assert.strictEqual(sized(50_000, 49_999), "452 4.3.1")
  })
})

describe("Smtp.protocol", () => {
  it("follows RFC 3848 and RFC 6531", () => {
    assert.deepStrictEqual(
      [
        protocol(false, false, false),
        protocol(true, false, false),
        protocol(true, true, false),
        protocol(true, false, true),
        protocol(true, true, true)
      ],
      ["SMTP", "ESMTP", "ESMTPS", "UTF8SMTP", "UTF8SMTPS"]
    )
  })
})
