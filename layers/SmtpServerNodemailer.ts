// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The SMTP server on the library smtp-server: listening, who gets in, deadlines, going down. The
 * dialogue itself is in `SmtpServerSession`.
 */
import { constants } from "node:crypto"
import type { Socket } from "node:net"
import * as Clock from "effect/Clock"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as Result from "effect/Result"
import * as Schedule from "effect/Schedule"
import { SMTPServer } from "smtp-server"
import type { SMTPServerOptions } from "smtp-server"
import * as Smtp from "../src/mail/Smtp.ts"
import { ListenError, SmtpServer } from "../src/services/SmtpServer.ts"
import type { Limits, Listener, Policy, Service } from "../src/services/SmtpServer.ts"
import { Session } from "./SmtpServerSession.ts"
import type { Shared } from "./SmtpServerSession.ts"
import * as Sources from "./SmtpServerSources.ts"

/** For a client that was turned away or told to go, to read why before its connection is cut. */
const lingerMillis = 2000

/** What the library can do and we do not offer, RFC 5321 section 7.8. */
const disabledCommands = ["AUTH", "XCLIENT", "XFORWARD", "WIZ", "SHELL", "KILL", "LHLO"]

const serve = Effect.fnUntraced(function* (service: Service, policy: Policy) {
  const house = new House(service, policy, yield* Effect.context<never>())
  yield* Effect.addFinalizer(() => stop(house))
  const bound = yield* Effect.forEach(service.listeners, (listener) => {
    const door = new Door(house, listener)
    house.doors.push(door)
    return bind(door, listener)
  })
  yield* Effect.sync(() => house.checkAll()).pipe(
    Effect.repeat(Schedule.spaced(checkInterval(service.limits))),
    Effect.forkScoped
  )
  return bound
})

export const SmtpServerNodemailer: Layer.Layer<SmtpServer> = Layer.succeed(
  SmtpServer,
  SmtpServer.of({ serve })
)

/** Often enough for the shortest deadline, at most once a second. */
const checkInterval = (limits: Limits): Duration.Duration => {
  const { commandTimeout, dataTimeout, handshakeTimeout, sessionTimeout } = limits
  const shortest = [commandTimeout, dataTimeout, handshakeTimeout, sessionTimeout].reduce((a, b) =>
    Duration.min(a, b)
  )
  const bounds = { minimum: Duration.millis(1), maximum: Duration.seconds(1) }
  return Duration.clamp(Duration.divideUnsafe(shortest, 4), bounds)
}

/** All sessions of a service, and what they share. */
class House implements Shared {
  readonly service: Service
  readonly policy: Policy
  readonly sessions = new Set<Session>()
  readonly doors: Array<Door> = []
  readonly turnedAway = new Set<Socket>()
  readonly watchers = new Set<() => void>()
  readonly #clock: Clock.Clock
  readonly #run: <A>(effect: Effect.Effect<A>) => Fiber.Fiber<A>
  readonly #sources: Sources.Sources
  #isStopping = false

  constructor(service: Service, policy: Policy, context: Context.Context<never>) {
    this.service = service
    this.policy = policy
    this.#clock = Context.get(context, Clock.Clock)
    this.#run = Effect.runForkWith(context)
    this.#sources = Sources.make(service.limits)
  }

  now = (): number => Number(this.#clock.monotonicTimeNanosUnsafe() / 1_000_000n)

  isStopping = (): boolean => this.#isStopping

  note = (effect: Effect.Effect<void>): void => {
    this.#run(effect)
  }

  ask = (question: Effect.Effect<Smtp.Reply>, then: (answer: Smtp.Reply) => void): void => {
    this.#run(question).addObserver((exit) => {
      if (Exit.isFailure(exit)) this.note(Effect.logError("SMTP policy failed", exit.cause))
      then(Exit.isSuccess(exit) ? exit.value : Smtp.temporary)
    })
  }

  lost = (session: Session): void => {
    // Whoever scans for servers does this all day, and an address is not for the log above debug.
    this.note(
      Effect.logDebug("connection lost within a message, nothing queued").pipe(
        Effect.annotateLogs({ client: session.remoteAddress })
      )
    )
  }

  /** What a new connection may have, or why it cannot be taken. */
  enter(ip: string): Result.Result<Sources.Share, Smtp.Reply> {
    if (this.#isStopping) return Result.fail(Smtp.shuttingDown)
    if (this.sessions.size >= this.service.limits.connections) return Result.fail(tooMany)
    return Result.fromNullishOr(this.#sources.enter(ip), () => tooManyOfYou)
  }

  changed = (session: Session): void => {
    if (session._closed) this.sessions.delete(session)
    for (const watcher of this.watchers) watcher()
  }

  checkAll(): void {
    const now = this.now()
    for (const door of this.doors) {
      for (const session of door.connections) (session as Session).check(now)
    }
  }

  beginStop(): void {
    this.#isStopping = true
    for (const session of this.sessions) session.stop()
  }

  /** Writes the whole reply, then closes; the client has a moment to read it. */
  turnAway(socket: Socket, { code, status, text }: Smtp.Reply): void {
    // As many again as we serve; beyond that a flood is not worth a descriptor.
    if (this.turnedAway.size >= this.service.limits.connections) {
      socket.destroy()
      return
    }
    this.turnedAway.add(socket)
    socket.on("close", () => this.turnedAway.delete(socket))
    socket.end(`${code} ${status} ${this.service.hostname} ${text}\r\n`)
    socket.resume()
    setTimeout(() => socket.destroy(), lingerMillis).unref()
  }

  cutAll(): void {
    for (const session of this.sessions) session.destroy()
    for (const socket of this.turnedAway) socket.destroy()
  }
}

const tooMany = Smtp.reply(421, "4.3.2", "too many connections, try again later")
const tooManyOfYou = Smtp.reply(421, "4.7.0", "too many connections from your address")

/** One listener: the library's server with our sessions. */
class Door extends SMTPServer {
  readonly #house: House
  readonly #listener: string

  constructor(house: House, listener: Listener) {
    super(options(house.service))
    this.#house = house
    this.#listener = listener.name
    // Before the library has its own listeners in place a connection may already be reset.
    this.server.prependListener("connection", (socket) => socket.on("error", () => undefined))
    // Failed handshakes, resets, and accept() without descriptors (EMFILE): the server goes on.
    this.on("error", (cause: Error) => house.note(Effect.logDebug("SMTP connection failed", cause)))
  }

  override connect(socket: Socket): void {
    // A peer that is gone already has no address any more.
    const ip = socket.remoteAddress
    if (ip === undefined || socket.destroyed) {
      socket.destroy()
      return
    }
    const share = this.#house.enter(ip)
    if (Result.isFailure(share)) return this.#house.turnAway(socket, share.failure)
    const session = new Session(this, socket, this.#house, {
      listener: this.#listener,
      share: share.success
    })
    this.connections.add(session)
    this.#house.sessions.add(session)
    session.on("error", (cause: Error) => this._onError(cause))
    session.init()
  }
}

/** Milliseconds a timer of Node can wait: 31 bits. */
const longestTimer = 2 ** 31 - 1

const options = ({ hostname, limits, tls }: Service): SMTPServerOptions => ({
  name: hostname,
  size: limits.messageBytes,
  heloResponse: "%s",
  hideENHANCEDSTATUSCODES: false,
  hideSTARTTLS: tls === undefined,
  disabledCommands: tls === undefined ? [...disabledCommands, "STARTTLS"] : disabledCommands,
  disableReverseLookup: true,
  logger: false,
  // The session keeps shorter deadlines; this one only ends what they should have ended.
  socketTimeout: Math.min(2 * Duration.toMillis(limits.sessionTimeout), longestTimer),
  onConnect: (_session, done) => done(),
  onSecure: (_socket, _session, done) => done(),
  // RFC 8996 ends TLS 1.0 and 1.1. No tickets: their key would outlive the sessions it protects.
  minVersion: "TLSv1.2",
  secureOptions: constants.SSL_OP_NO_TICKET | constants.SSL_OP_NO_RENEGOTIATION,
  ...(tls === undefined ? {} : { cert: tls.cert, key: tls.key })
})

const bind = (door: Door, listener: Listener): Effect.Effect<Listener, ListenError> =>
  Effect.callback((resume) => {
    const failed = (cause: NodeJS.ErrnoException): void =>
      resume(Effect.fail(listenError(listener, cause)))
    door.server.once("error", failed)
    door.listen({ host: listener.address, port: listener.port }, () => {
      door.server.off("error", failed)
      const address = door.server.address()
      const port = typeof address === "object" && address !== null ? address.port : listener.port
      resume(Effect.succeed({ ...listener, port }))
    })
  })

const listenError = ({ address, port }: Listener, cause: NodeJS.ErrnoException): ListenError => {
  const reasons: { readonly [code: string]: ListenError["reason"] } = {
    EADDRINUSE: "in use",
    EACCES: "not permitted",
    EPERM: "not permitted",
    EADDRNOTAVAIL: "no such address"
  }
  return new ListenError({ reason: reasons[cause.code ?? ""] ?? "other", address, port, cause })
}

/**
 * Stops listening, then lets go in steps: who is idle at once, who is sending a message within the
 * grace, whose message is being committed when that is done; at last what does not close by itself.
 */
const stop = Effect.fnUntraced(function* (house: House) {
  const closed = yield* Effect.forEach(house.doors, closeDoor, {
    concurrency: house.doors.length,
    discard: true
  }).pipe(Effect.forkChild({ startImmediately: true }))
  house.beginStop()
  const { stopGrace } = house.service.limits
  yield* within(
    until(house, () => none(house, (session) => session.isReceiving)),
    stopGrace
  )
  for (const session of house.sessions) session.abort()
  yield* until(house, () => none(house, (session) => session.isCommitting))
  yield* within(Fiber.join(closed), Duration.millis(lingerMillis))
  house.cutAll()
  yield* Fiber.join(closed)
})

const none = (house: House, holds: (session: Session) => boolean): boolean =>
  ![...house.sessions].some(holds)

const closeDoor = (door: Door): Effect.Effect<void> =>
  Effect.callback((resume) => {
    if (door.server.listening) door.server.close(() => resume(Effect.void))
    else resume(Effect.void)
  })

const until = (house: House, holds: () => boolean): Effect.Effect<void> =>
  Effect.callback((resume) => {
    const check = (): void => {
      if (!holds()) return
      house.watchers.delete(check)
      resume(Effect.void)
    }
    house.watchers.add(check)
    check()
    return Effect.sync(() => house.watchers.delete(check))
  })

const within = (wait: Effect.Effect<void>, atMost: Duration.Duration): Effect.Effect<void> =>
  Effect.raceFirst(Effect.interruptible(wait), Effect.interruptible(Effect.sleep(atMost)))
