// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Result from "effect/Result"
import * as Schema from "effect/Schema"
import * as Maildir from "../../src/mail/Maildir.ts"

const name = (token: string, recipient: string): string =>
  Maildir.deliveryName(1_700_000_000, token, recipient)
const token = "0123456789abcdef0123456789abcdef"

describe("names", () => {
  it("are made from the moment, the message and the recipient", () => {
    // First 8 digits of SHA-256("ann@example.org").
    assert.strictEqual(name(token, "ann@example.org"), `1700000000.T${token}R438c4c7a`)
    assert.notStrictEqual(name(token, "ann@example.org"), name(token, "bob@example.org"))
  })

  it("take any token", () => {
    for (const odd of ["a.b", "a,S=1", "a:2,S", "é", "x".repeat(100), "..", ""]) {
      assert.match(name(odd, "a@b"), /^1700000000\.T[0-9a-f]{32}R[0-9a-f]{8}$/)
    }
  })

  it("say both sizes, and the host in characters a name may have", () => {
    const host = Maildir.hostPart("a/b:c d.example")
    assert.strictEqual(host, "a\\057b\\072c_d.example")
    const file = Maildir.fileName(name(token, "a@b"), host, { octets: 100, lines: 5 })
    assert.isTrue(file.endsWith(`.${host},S=100,W=105`))
    assert.isBelow(
      Buffer.byteLength(
        Maildir.fileName(name("y".repeat(64), "a@b"), Maildir.hostPart("h".repeat(253)), {
          octets: 10 ** 12,
          lines: 10 ** 10
        })
      ),
      255
    )
  })

  it("tell the delivery whatever flags a reader adds", () => {
    const delivery = name(token, "a@b")
    const file = Maildir.fileName(delivery, "mail.example.org", { octets: 1, lines: 0 })
    assert.strictEqual(Maildir.deliveryOf(`${file}:2,FS`), delivery)
    assert.strictEqual(Maildir.deliveryOf("1.M2P3"), "1.M2P3")
    assert.strictEqual(Maildir.deliveryOf("dovecot"), "dovecot")
  })
})

/** Converts in slices of `size` octets. */
const converted = (input: Uint8Array, size: number): readonly [string, Maildir.Sizes] => {
  const out = Buffer.alloc(size)
  const where = { from: 0, at: 0 }
  const sizes = { octets: 0, lines: 0 }
  let text = ""
  while (where.from < input.length) {
    where.at = 0
    Maildir.convert(input, out, where, sizes)
    text += out.toString("latin1", 0, where.at)
  }
  return [text, sizes]
}

const Octets = Schema.Array(Schema.Literals([13, 10, 65, 255, 0]))
const Size = Schema.Int.check(Schema.isBetween({ minimum: 1, maximum: 9 }))

describe("line ends", () => {
  it.prop(
    "CRLF becomes LF and nothing else changes, in slices of any size",
    { octets: Octets, size: Size },
    ({ octets, size }) => {
      const input = Uint8Array.from(octets)
      const [text, sizes] = converted(input, size)
      const wanted = Buffer.from(input).toString("latin1").replaceAll("\r\n", "\n")
      assert.strictEqual(text, wanted)
      assert.deepStrictEqual(sizes, { octets: wanted.length, lines: wanted.split("\n").length - 1 })
    },
    { arbitrary: { runs: 500 } }
  )

  it("R67: a value never ends its line", () => {
    assert.strictEqual(
      Maildir.line("Return-Path", "<a@b\r\nBcc: evil@x\0\u0085>"),
      "Return-Path: <a@bBcc: evil@x>\n"
    )
  })
})

const place = (text: string, mailbox: string, domain = "example.org") =>
  Maildir.place(Result.getOrThrow(Maildir.template(text)), { mailbox, domain })

const why = (text: string): string =>
  Result.getOrElse(Result.flip(Maildir.template(text)), () => "no error")

describe("templates", () => {
  it("give the mailbox and the directories that are ours", () => {
    assert.deepStrictEqual(place("/home/pepsi/mail/{mailbox}", "ann"), {
      directory: "/home/pepsi/mail/ann",
      root: "/home/pepsi/mail"
    })
    assert.deepStrictEqual(place("/v/{domain}/{mailbox}/Maildir/", "a.b"), {
      directory: "/v/example.org/a.b/Maildir",
      root: "/v/example.org"
    })
    assert.deepStrictEqual(place("/{mailbox}", "ann"), { directory: "/ann", root: "/" })
    assert.deepStrictEqual(place("./mail/{mailbox}@{domain}", "ann"), {
      directory: "./mail/ann@example.org",
      root: "./mail"
    })
  })

  it("refuse a name that leads elsewhere", () => {
    for (const mailbox of ["..", ".", "", "a/b", "/etc", "../x", "a\0b", "a\nb", "x".repeat(256)]) {
      assert.isUndefined(place("/mail/{mailbox}", mailbox), JSON.stringify(mailbox))
    }
    assert.isUndefined(place("/mail/.{mailbox}", "."))
    assert.isUndefined(place("/mail/{domain}/{mailbox}", "ann", ".."))
    assert.isUndefined(place("/mail/{domain}/{mailbox}", "ann", ""))
    assert.isDefined(place("/mail/{mailbox}", "ann", ""))
    assert.deepStrictEqual(place("/mail/{mailbox}", "{domain}")?.directory, "/mail/{domain}")
  })

  it("are refused with the reason", () => {
    assert.match(why("/mail/{user}"), /^it has \{user\}, where only/)
    assert.match(why("/mail"), /^it has no \{mailbox\}/)
    assert.match(why("/mail/{mailbox}/../x"), /no \.\. behind/)
    assert.strictEqual(why("/srv/../mail/{mailbox}"), "no error")
    assert.match(why("{mailbox}"), /must begin with a directory/)
  })
})
