// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * What the tests of the ingress share: a queue that records, a duty on real sockets, a bare client.
 */
import { connect } from "node:net"
import type { Socket } from "node:net"
import { connect as connectTls } from "node:tls"
import type { TLSSocket } from "node:tls"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as References from "effect/References"
import * as SecureRandom from "effect/crypto/SecureRandom"
import { AccountsConfig } from "../../layers/AccountsConfig.ts"
import { SmtpServerNodemailer } from "../../layers/SmtpServerNodemailer.ts"
import * as Ingress from "../../src/daemon/Ingress.ts"
import type { Accounts } from "../../src/services/Accounts.ts"
import { Control } from "../../src/services/Control.ts"
import type { Limits } from "../../src/services/SmtpServer.ts"
import type { DatabaseError } from "../../src/services/DatabaseError.ts"
import type { Entry } from "../../src/pipeline/Job.ts"
import { Queue } from "../../src/services/Queue.ts"
import type { Admission } from "../../src/services/Queue.ts"

/** A queue that keeps what is admitted, batch by batch; a hook may hold a commit up or fail it. */
export const makeRecorder = () => {
  const batches: Array<ReadonlyArray<Admission>> = []
  const announced: Array<Entry> = []
  const recorder = {
    batches,
    announced,
    rows: (): ReadonlyArray<Admission> => batches.flat(),
    before: (_batch: ReadonlyArray<Admission>): Effect.Effect<void, DatabaseError> => Effect.void
  }
  const unused = Effect.die("not used by the ingress")
  const layer = Layer.mergeAll(
    Layer.succeed(Queue, {
      ...new Proxy({} as Queue["Service"], { get: () => () => unused }),
      notify: unused,
      admit: (messages) =>
        Effect.suspend(() => recorder.before(messages)).pipe(
          Effect.map(() => {
            // Octets are valid only until the reply is given: the table has its own copy.
            batches.push(
              messages.map((m) => ({
                ...m,
                headers: Buffer.from(m.headers),
                body: Buffer.from(m.body)
              }))
            )
            return messages.map(
              (message, i): Entry => ({
                id: batches.length * 100 + i,
                rev: 0,
                section: message.section,
                attempts: 0,
                crashes: 0,
                repeat: false,
                sizeBytes: message.headers.length + message.body.length,
                fairKey: message.fairKey
              })
            )
          })
        )
    } as Queue["Service"]),
    Layer.succeed(Control, {
      admitted: (entries: ReadonlyArray<Entry>) => {
        announced.push(...entries)
      }
    } as Control["Service"])
  )
  return { ...recorder, recorder, layer }
}

export type Recorder = ReturnType<typeof makeRecorder>

export const settings: Ingress.Settings = {
  hostname: "mx.ours.example",
  listeners: [{ name: "mx", address: "127.0.0.1", port: 0 }],
  tls: undefined,
  section: "init",
  postmaster: "postmaster@ours.example",
  headerBytes: 256 * 1024,
  maxHops: 50,
  batchRows: 64,
  batchBytes: 8 * 1024 * 1024,
  commits: 1,
  limits: {
    messageBytes: 1024 * 1024,
    lineBytes: 64 * 1024,
    recipients: 200,
    connections: 256,
    connectionsPerSource: 8,
    exempt: ["127.0.0.0/8", "::1"],
    sourceShare: 0.25,
    memoryBytes: 64 * 1024 * 1024,
    commandTimeout: Duration.minutes(5),
    dataTimeout: Duration.minutes(3),
    minBytesPerSecond: 500,
    handshakeTimeout: Duration.seconds(30),
    sessionTimeout: Duration.minutes(30),
    errors: 15,
    idleCommands: 100,
    unknownRecipients: 2,
    unknownDelay: Duration.seconds(2),
    stopGrace: Duration.seconds(30)
  }
}

/** The settings with other limits. */
export const limited = (changes: Partial<Limits>): Pick<Ingress.Settings, "limits"> => ({
  limits: { ...settings.limits, ...changes }
})

/** People of ours.example: dave and eve; and whoever is in `more`. */
export const accounts = (more: ReadonlyArray<string> = []) =>
  AccountsConfig({
    domains: ["ours.example"],
    delimiter: "+",
    localParts: ["dave", "eve", "u", "a b", ...more]
  })

/** A duty with the recorder behind it; gives the port. */
export const start = (
  recorder: Recorder,
  changes: Partial<Ingress.Settings> = {},
  people: Layer.Layer<Accounts> = accounts(["jörg"])
) =>
  startLogged(recorder, changes, people).pipe(
    Effect.provideService(References.MinimumLogLevel, "None")
  )

export const startLogged = Effect.fnUntraced(function* (
  recorder: Recorder,
  changes: Partial<Ingress.Settings> = {},
  people: Layer.Layer<Accounts> = accounts(["jörg"])
) {
  const context = yield* Layer.build(
    Ingress.layer({ ...settings, ...changes }).pipe(
      Layer.provide([SmtpServerNodemailer, people, recorder.layer, SecureRandom.layerWebCrypto])
    )
  )
  return yield* Ingress.Ingress.pipe(
    Effect.map(({ listeners }) => listeners[0]!.port),
    Effect.provideContext(context)
  )
})

/** A client that says exactly what it is told and reads whole replies. */
export class Client {
  socket: Socket | TLSSocket
  #text = ""
  #isClosed = false
  #wake: () => void = () => undefined
  readonly closed: Promise<void>

  constructor(port: number, host = "127.0.0.1") {
    // Each write leaves at once: Nagle's wait for an acknowledgement would reorder what tests say.
    this.socket = connect({ port, host, noDelay: true })
    this.closed = new Promise((resolve) => this.socket.once("close", () => resolve()))
    this.#listen()
  }

  #listen(): void {
    this.socket.on("error", () => undefined)
    this.socket.on("data", (chunk: Buffer) => {
      this.#text += chunk.toString()
      this.#wake()
    })
    this.socket.on("close", () => {
      this.#isClosed = true
      this.#wake()
    })
  }

  /** The next reply, its lines joined by "|"; "closed" when there is none any more. */
  async reply(): Promise<string> {
    while (true) {
      const whole = /^(?:\d{3}-[^\n]*\n)*\d{3}(?: [^\n]*)?\n/.exec(this.#text)?.[0]
      if (whole !== undefined) {
        this.#text = this.#text.slice(whole.length)
        return whole.trimEnd().replaceAll("\r\n", "|")
      }
      if (this.#isClosed) return "closed"
      await new Promise<void>((resolve) => {
        this.#wake = resolve
      })
    }
  }

  send(octets: string | Uint8Array): void {
    this.socket.write(octets)
  }

  /** Sends a line, gives its reply. */
  async say(line: string): Promise<string> {
    this.send(`${line}\r\n`)
    return await this.reply()
  }

  async greet(): Promise<string> {
    await this.reply()
    return await this.say("EHLO client.example")
  }

  /** Up to and including 354. */
  async toData(recipient = "dave@ours.example"): Promise<string> {
    await this.say("MAIL FROM:<s@example.org>")
    await this.say(`RCPT TO:<${recipient}>`)
    return await this.say("DATA")
  }

  /** A whole message, dots and end as given; the reply to it. */
  async message(octets: string | Uint8Array, recipient?: string): Promise<string> {
    const ready = await this.toData(recipient)
    if (!ready.startsWith("354")) return ready
    this.send(octets)
    return await this.reply()
  }

  async startTls(): Promise<string> {
    const ready = await this.say("STARTTLS")
    if (ready.startsWith("220")) await this.secure()
    return ready
  }

  /** The handshake alone. */
  async secure(): Promise<void> {
    const socket = connectTls({ socket: this.socket, rejectUnauthorized: false })
    await new Promise<void>((resolve, reject) =>
      socket.once("secureConnect", resolve).once("error", reject)
    )
    this.socket = socket
    this.#listen()
  }
}

/** A client that is gone when the scope is. */
export const client = (port: number) =>
  Effect.acquireRelease(
    Effect.sync(() => new Client(port)),
    (one) => Effect.sync(() => one.socket.destroy())
  )

export const greeted = Effect.fnUntraced(function* (port: number) {
  const one = yield* client(port)
  yield* Effect.promise(() => one.greet())
  return one
})

/** A gate that a commit can be made to wait at, and that tells when something waits. */
export const makeGate = Effect.gen(function* () {
  const reached = yield* Deferred.make<void>()
  const opened = yield* Deferred.make<void>()
  return {
    pass: Deferred.succeed(reached, undefined).pipe(Effect.andThen(Deferred.await(opened))),
    reached: Deferred.await(reached),
    open: Deferred.succeed(opened, undefined)
  }
})
