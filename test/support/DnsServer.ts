// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * A small authoritative name server on loopback (RFC 1035), for tests: answers from a zone table
 * over UDP and TCP, and fails on demand. Touches one port of 127.0.0.1, in UDP and TCP.
 */
import { createSocket } from "node:dgram"
import type { Socket as UdpSocket } from "node:dgram"
import { createServer } from "node:net"
import type { Server, Socket } from "node:net"
import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import { lookup } from "./DnsZone.ts"
import type { Lookup, Question, Zone } from "./DnsZone.ts"

export interface DnsServer {
  /** `127.0.0.1:PORT`, as the option RESOLVER takes it. */
  readonly address: string
  /** The questions so far, in their order. */
  readonly asked: Array<Question & { readonly over: "udp" | "tcp" }>
  /** Serves another zone from now on; questions without an answer so far get it from there. */
  readonly serve: (zone: Zone) => void
}

const types: { readonly [type: string]: number } = {
  A: 1,
  CNAME: 5,
  PTR: 12,
  MX: 15,
  TXT: 16,
  AAAA: 28
}
const typeNames = new Map(Object.entries(types).map(([name, code]) => [code, name]))

const wireName = (name: string): Buffer =>
  Buffer.concat([
    ...name
      .replace(/\.$/, "")
      .split(".")
      .filter((label) => label !== "")
      .map((label) => Buffer.concat([Buffer.from([label.length]), Buffer.from(label, "latin1")])),
    Buffer.from([0])
  ])

/** Eight groups of an address of IPv6, `::` filled in. */
const ipv6 = (address: string): Buffer => {
  const [head = "", tail] = address.split("::")
  const groups = (text: string) => (text === "" ? [] : text.split(":"))
  const after = tail === undefined ? [] : groups(tail)
  const before = groups(head)
  const middle = tail === undefined ? [] : Array<string>(8 - before.length - after.length).fill("0")
  const octets = [...before, ...middle, ...after].map((group) => Number.parseInt(group, 16))
  return Buffer.from(octets.flatMap((n) => [n >> 8, n & 255]))
}

const txt = (strings: ReadonlyArray<string>): Buffer =>
  Buffer.concat(
    strings.flatMap((string) => {
      const octets = Buffer.from(string, "latin1")
      const parts = Array.from({ length: Math.max(1, Math.ceil(octets.length / 255)) }, (_, i) =>
        octets.subarray(i * 255, (i + 1) * 255)
      )
      return parts.flatMap((part) => [Buffer.from([part.length]), part])
    })
  )

const rdata = (type: string, record: string | ReadonlyArray<string>): Buffer => {
  if (type === "TXT") return txt([record].flat())
  const text = String(record)
  if (type === "A") return Buffer.from(text.split(".").map(Number))
  if (type === "AAAA") return ipv6(text)
  if (type !== "MX") return wireName(text)
  const [preference, exchange = "."] = text.split(" ")
  return Buffer.concat([Buffer.from([0, Number(preference)]), wireName(exchange)])
}

/** Seconds an answer may be kept. */
const ttl = 60

const answerRecord = (type: string, record: string | ReadonlyArray<string>): Buffer => {
  const value = rdata(type, record)
  const head = Buffer.alloc(12)
  head.writeUInt16BE(0xc00c, 0) // the name of the question (RFC 1035 section 4.1.4)
  head.writeUInt16BE(types[type]!, 2)
  head.writeUInt16BE(1, 4)
  head.writeUInt32BE(ttl, 6)
  head.writeUInt16BE(value.length, 10)
  return Buffer.concat([head, value])
}

interface Parsed extends Question {
  readonly id: number
  /** The question as it came, to be sent back. */
  readonly octets: Buffer
  /** The largest answer over UDP (RFC 6891 section 6.2.3). */
  readonly room: number
}

const parse = (packet: Buffer): Parsed => {
  const labels: Array<string> = []
  let at = 12
  for (let length = packet[at]!; length !== 0; length = packet[at]!) {
    labels.push(packet.toString("latin1", at + 1, at + 1 + length))
    at += 1 + length
  }
  const type = packet.readUInt16BE(at + 1)
  const end = at + 5
  // An OPT record follows at once if there is one: root name, type 41, class = size.
  const hasOpt = packet.length >= end + 5 && packet.readUInt16BE(end + 1) === 41
  return {
    id: packet.readUInt16BE(0),
    name: labels.join(".").toLowerCase(),
    type: typeNames.get(type) ?? String(type),
    octets: packet.subarray(12, end),
    room: hasOpt ? packet.readUInt16BE(end + 3) : 512
  }
}

const codes = { Records: 0, NoData: 0, NoName: 3, Trouble: 2 } as const

const reply = (question: Parsed, answer: Lookup, room: number): Buffer => {
  const code = answer._tag === "Trouble" && answer.trouble === "REFUSED" ? 5 : codes[answer._tag]
  const records = answer._tag === "Records" ? answer.records : []
  const body = Buffer.concat(records.map((record) => answerRecord(question.type, record)))
  const isCut = 12 + question.octets.length + body.length > room
  const head = Buffer.alloc(12)
  head.writeUInt16BE(question.id, 0)
  head.writeUInt16BE(0x8580 | (isCut ? 0x0200 : 0) | code, 2) // QR AA RD RA, TC
  head.writeUInt16BE(1, 4)
  head.writeUInt16BE(isCut ? 0 : records.length, 6)
  return Buffer.concat([head, question.octets, ...(isCut ? [] : [body])])
}

interface Sockets {
  readonly udp: UdpSocket
  readonly tcp: Server
  readonly open: Set<Socket>
  readonly port: number
}

/** The same port in UDP and TCP; another one is tried when TCP has it taken. */
const listen = async (tries = 10): Promise<Sockets> => {
  const udp = createSocket("udp4")
  await new Promise<void>((resolve) => udp.bind(0, "127.0.0.1", resolve))
  const port = udp.address().port
  const open = new Set<Socket>()
  const tcp = createServer((socket) => {
    open.add(socket)
    socket.on("close", () => open.delete(socket))
    socket.on("error", () => socket.destroy())
  })
  const isOurs = await new Promise<boolean>((resolve) => {
    tcp.once("error", () => resolve(false))
    tcp.listen(port, "127.0.0.1", () => resolve(true))
  })
  if (isOurs) return { udp, tcp, open, port }
  udp.close()
  if (tries === 0) throw new Error("no port is free in both UDP and TCP")
  return listen(tries - 1)
}

const close = (sockets: Sockets): Promise<void> => {
  for (const socket of sockets.open) socket.destroy()
  sockets.udp.close()
  return new Promise((resolve) => sockets.tcp.close(() => resolve()))
}

/** TCP carries each message behind its length (RFC 1035 section 4.2.2). */
const eachMessage = (socket: Socket, f: (message: Buffer) => void): void => {
  let held = Buffer.alloc(0)
  socket.on("data", (chunk: Buffer) => {
    held = Buffer.concat([held, chunk])
    while (held.length >= 2 && held.length >= 2 + held.readUInt16BE(0)) {
      const length = held.readUInt16BE(0)
      f(held.subarray(2, 2 + length))
      held = held.subarray(2 + length)
    }
  })
}

/** Serves `zone` until the scope closes. */
export const start = (zone: Zone): Effect.Effect<DnsServer, never, Scope.Scope> =>
  Effect.acquireRelease(
    Effect.promise(() => listen()),
    (sockets) => Effect.promise(() => close(sockets))
  ).pipe(
    Effect.map(({ port, tcp, udp }) => {
      let served = zone
      const asked: DnsServer["asked"] = []
      const held: Array<() => void> = []
      const answer = (packet: Buffer, over: "udp" | "tcp", send: (octets: Buffer) => void) => {
        const question = parse(packet)
        asked.push({ name: question.name, type: question.type, over })
        const respond = () => {
          const found = lookup(served, question.name, question.type)
          if (found._tag === "Trouble" && found.trouble === "TIMEOUT") held.push(respond)
          else send(reply(question, found, over === "tcp" ? 65_535 : question.room))
        }
        respond()
      }
      const serve = (next: Zone) => {
        served = next
        for (const respond of held.splice(0)) respond()
      }
      udp.on("message", (packet, from) =>
        answer(packet, "udp", (octets) => udp.send(octets, from.port, from.address))
      )
      tcp.on("connection", (socket) =>
        eachMessage(socket, (message) =>
          answer(message, "tcp", (octets) => {
            const length = Buffer.alloc(2)
            length.writeUInt16BE(octets.length)
            socket.write(Buffer.concat([length, octets]))
          })
        )
      )
      return { address: `127.0.0.1:${port}`, asked, serve }
    })
  )
