// SPDX-License-Identifier: AGPL-3.0-or-later
/** The row a message becomes. */
import { assert, describe, it } from "@effect/vitest"
import * as Result from "effect/Result"
import * as Intake from "../../../src/daemon/ingress/Intake.ts"
import type { Incoming } from "../../../src/services/SmtpServer.ts"

const settings: Intake.Settings = {
  hostname: "mx.ours.example",
  section: "init",
  headerBytes: 1000,
  maxHops: 3
}
const drawn: Intake.Drawn = { token: "0123456789abcdef0123456789abcdef", atMillis: 0 }

const incoming = (octets: string, changes: Partial<Incoming> = {}): Incoming => ({
  client: {
    ip: "198.51.100.7",
    port: 4711,
    helo: "c.example",
    isExtended: true,
    tls: undefined,
    listener: "mx"
  },
  mail: { sender: undefined, sizeBytes: 0, body: undefined, smtputf8: false },
  recipients: [{ local: "u", domain: "ours.example" }],
  octets: Buffer.from(octets),
  ...changes
})

const refusal = (octets: string) => {
  const row = Intake.toRow(incoming(octets), drawn, settings)
  return Result.isFailure(row) ? `${row.failure.code} ${row.failure.status}` : "taken"
}

describe("Intake.toRow", () => {
  it("keeps every octet and puts one field on top", () => {
    const row = Result.getOrThrow(
      Intake.toRow(incoming("Subject: x\r\n\r\nbody\r\n"), drawn, settings)
    )
    assert.deepStrictEqual(
      {
        ...row,
        headers: Buffer.from(row.headers).toString(),
        body: Buffer.from(row.body).toString()
      },
      {
        token: drawn.token,
        sender: "",
        recipients: ["u@ours.example"],
        fromHeader: null,
        subject: "x",
        messageId: null,
        listId: null,
        headers:
          "Received: from c.example (unknown [198.51.100.7])\r\n" +
          `\tby mx.ours.example with ESMTP id ${drawn.token}\r\n\tfor <u@ours.example>;\r\n` +
          "\tThu, 01 Jan 1970 00:00:00 +0000\r\nSubject: x\r\n",
        body: "body\r\n",
        section: "init",
        fairKey: "n:198.51.100.0/24",
        state: {
          local_origin: false,
          client: {
            ip: "198.51.100.7",
            port: 4711,
            helo: "c.example",
            proto: "ESMTP",
            listener: "mx"
          }
        }
      }
    )
  })

  it("refuses what loops, what has too large a header and what is a mailbox file", () => {
    assert.strictEqual(refusal("Received: a\r\n".repeat(2)), "taken")
    assert.strictEqual(refusal("Received: a\r\nrEceived : a\r\nRECEIVED: a\r\n"), "554 5.4.6")
    assert.strictEqual(refusal(`X: ${"y".repeat(1000)}\r\n\r\n`), "552 5.3.4")
    assert.strictEqual(refusal(`\r\n${"y".repeat(1000)}\r\n`), "taken")
    assert.strictEqual(refusal("From s@example.org Mon\r\n\r\n"), "550 5.6.0")
    assert.strictEqual(refusal("no header at all\r\n"), "taken")
    assert.strictEqual(refusal(""), "taken")
  })

  it("49 MB of tiny fields are looked at no further than the limit", () => {
    const bomb = Buffer.alloc(49 * 1024 * 1024, "a:\r\n")
    const started = process.hrtime.bigint()
    const row = Intake.toRow(incoming("", { octets: bomb }), drawn, {
      ...settings,
      headerBytes: 256 * 1024
    })
    const millis = Number(process.hrtime.bigint() - started) / 1e6
    assert.deepStrictEqual(Result.isFailure(row) && [row.failure.code, row.failure.status], [
      552,
      "5.3.4"
    ])
    assert.isBelow(millis, 250, "milliseconds in which nobody else is served")
  })

  it("gives neighbours one turn", () => {
    assert.deepStrictEqual(
      ["198.51.100.7", "::ffff:198.51.100.9", "2001:db8:1:2::3", "::1", "127.0.0.1", "bad"].map(
        Intake.fairKey
      ),
      [
        "n:198.51.100.0/24",
        "n:198.51.100.0/24",
        "n:2001:db8:1::/48",
        "n:127.0.0.0/24",
        "n:127.0.0.0/24",
        "n:unknown"
      ]
    )
  })
})
