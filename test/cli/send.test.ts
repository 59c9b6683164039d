// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "vitest"
import { complete } from "../../src/cli/send.ts"

const now = new Date(Date.UTC(2026, 0, 2, 3, 4, 5))

describe("pepsi send", () => {
  it("a bare text gets a header, its own octets stay", () => {
    const mail = complete(Buffer.from("Grüße\nzwei\n"), "a@x.example", ["ģ@pepsi.test"], now)
    assert.strictEqual(
      mail.toString("utf8"),
      "From: a@x.example\r\nTo: ģ@pepsi.test\r\nDate: Fri, 02 Jan 2026 03:04:05 +0000\r\n" +
        "Subject: a message from pepsi send\r\n\r\nGrüße\r\nzwei\r\n"
    )
  })

  it("a message with a header is left alone", () => {
    const mail = Buffer.from("Subject: x\n\ny\n")
    assert.strictEqual(complete(mail, "a@x.example", ["b@pepsi.test"], now), mail)
  })
})
