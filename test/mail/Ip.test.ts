// SPDX-License-Identifier: AGPL-3.0-or-later
/** Addresses as text and octets. */
import { assert, describe, it } from "@effect/vitest"
import { BlockList, isIP } from "node:net"
import * as Arbitrary from "effect/Arbitrary"
import * as Schema from "effect/Schema"
import * as Ip from "../../src/mail/Ip.ts"

const octets = (text: string) => Ip.parse(text)?.join(".")
const hostile = Arbitrary.map(
  Arbitrary.array(
    Arbitrary.schema(
      Schema.Literals([...Array.from("0123456789abcdefg"), ":", "::", ".", "255", "ffff"])
    ),
    { maxLength: 14 }
  ),
  (all) => all.join("")
)

const of = (text: string) => Ip.neighbourhood(Ip.parse(text)!)

describe("Ip", () => {
  it("reads both families", () => {
    assert.strictEqual(octets("192.0.2.1"), "192.0.2.1")
    assert.strictEqual(octets("::ffff:192.0.2.1"), "192.0.2.1")
    assert.strictEqual(octets("2001:DB8::1"), "32.1.13.184.0.0.0.0.0.0.0.0.0.0.0.1")
    assert.strictEqual(octets("64:ff9b::192.0.2.33"), "0.100.255.155.0.0.0.0.0.0.0.0.192.0.2.33")
    assert.strictEqual(octets("::"), Array.from({ length: 16 }, () => 0).join("."))
  })

  it.prop("takes for an address what the system takes for one", { text: hostile }, ({ text }) => {
    // The system also takes "1.2.3.04"-like forms differently by version: leading zeros are left out.
    if (/(?:^|[.:])0\d/.test(text)) return
    assert.strictEqual(Ip.parse(text) !== undefined, isIP(text) !== 0, text)
  })

  it("knows what lies in a network", () => {
    const blocks = new BlockList()
    blocks.addSubnet("192.0.2.128", 25, "ipv4")
    const network = Ip.parseNetwork("192.0.2.128/25")!
    for (let last = 0; last < 256; last++) {
      assert.strictEqual(Ip.contains(network, [192, 0, 2, last]), blocks.check(`192.0.2.${last}`))
    }
    assert.strictEqual(Ip.contains(Ip.parseNetwork("::1")!, Ip.parse("::1")!), true)
    assert.strictEqual(Ip.contains(Ip.parseNetwork("0.0.0.0/0")!, Ip.parse("::1")!), false)
    for (const wrong of ["", "1.2.3.4/33", "1.2.3.4/", "1.2.3.4/8/8", "::/129", "x/8"]) {
      assert.strictEqual(Ip.parseNetwork(wrong), undefined, wrong)
    }
  })

  it("counts an address of IPv4 and a /64 of IPv6 as one source", () => {
    const source = (text: string) => Ip.source(Ip.parse(text)!)
    assert.strictEqual(source("198.51.100.7"), "198.51.100.7")
    assert.strictEqual(source("::ffff:198.51.100.7"), "198.51.100.7")
    assert.strictEqual(source("2001:db8:0:1:2:3:4:5"), source("2001:db8:0:1:ffff::"))
    assert.notStrictEqual(source("2001:db8:0:1::1"), source("2001:db8:0:2::1"))
  })

  it("puts neighbours together", () => {
    assert.strictEqual(of("198.51.100.7"), "198.51.100.0/24")
    assert.strictEqual(of("2001:db8:12:3456::9"), "2001:db8:12::/48")
    assert.strictEqual(of("127.1.2.3"), "127.0.0.0/24")
    assert.strictEqual(of("::1"), "127.0.0.0/24")
  })
})
