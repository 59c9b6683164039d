// SPDX-License-Identifier: AGPL-3.0-or-later
/** What a session knows of a socket; sessions as a whole are tested with the ingress. */
import { assert, describe, it } from "@effect/vitest"
import { Socket } from "node:net"
import { TLSSocket } from "node:tls"
import { tlsOf } from "../../layers/SmtpServerSession.ts"

describe("a TLS session", () => {
  it("that is destroyed while its message ends has no cipher any more, and that is no defect", () => {
    const socket = new TLSSocket(new Socket())
    socket.destroy()
    assert.deepStrictEqual(tlsOf(socket), { version: "", cipher: "" })
  })
})
