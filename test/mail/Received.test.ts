// SPDX-License-Identifier: AGPL-3.0-or-later
/** The trace field. */
import { assert, describe, it } from "@effect/vitest"
import * as Schema from "effect/Schema"
import * as Header from "../../src/mail/Header.ts"
import * as Received from "../../src/mail/Received.ts"

const trace: Received.Trace = {
  helo: "client.example",
  ip: "192.0.2.7",
  tls: { version: "TLSv1.3", cipher: "TLS_AES_256_GCM_SHA384" },
  hostname: "mx.ours.example",
  protocol: "ESMTPS",
  token: "0123456789abcdef0123456789abcdef",
  recipient: "dave@ours.example",
  atMillis: Date.UTC(2026, 10, 30, 8, 5, 9)
}

describe("Received.format", () => {
  it("tells where a message came from", () => {
    assert.strictEqual(
      Received.format(trace),
      "Received: from client.example (unknown [192.0.2.7])\r\n" +
        "\t(using TLSv1.3 with cipher TLS_AES_256_GCM_SHA384)\r\n" +
        "\tby mx.ours.example with ESMTPS id 0123456789abcdef0123456789abcdef\r\n" +
        "\tfor <dave@ours.example>;\r\n" +
        "\tMon, 30 Nov 2026 08:05:09 +0000\r\n"
    )
  })

  it("leaves out what there is not, and marks IPv6", () => {
    assert.strictEqual(
      Received.format({
        ...trace,
        helo: "",
        ip: "2001:db8::1",
        tls: undefined,
        recipient: undefined,
        protocol: "SMTP"
      }),
      "Received: from unknown (unknown [IPv6:2001:db8::1])\r\n" +
        "\tby mx.ours.example with SMTP id 0123456789abcdef0123456789abcdef;\r\n" +
        "\tMon, 30 Nov 2026 08:05:09 +0000\r\n"
    )
  })

  it.prop(
    "R67: is one field whatever a client calls itself",
    { helo: Schema.String, recipient: Schema.String },
    ({ helo, recipient }) => {
      for (const bad of [
        helo,
        `h.example\r\nRCPT TO:<e@example.org>`,
        `x) by evil.example; (`,
        `\u2028${helo}\0`
      ]) {
        const text = Received.format({ ...trace, helo: bad, recipient })
        const { fields } = Header.fromText(text)
        assert.strictEqual(fields.length, 1)
        assert.strictEqual(fields[0]!.end, Buffer.byteLength(text))
        assert.match(text, /^Received: from [A-Za-z0-9._:\-[\]?]+ \(unknown /)
        assert.strictEqual(/[^\r]\n|\r[^\n]|\0/.test(text), false)
      }
    }
  )
})
