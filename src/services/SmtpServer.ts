// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The server side of SMTP: sockets, lines, TLS, order of commands, limits and deadlines. Who may be
 * written to and what becomes of a message is decided by the policy that is handed in.
 */
import * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import type * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import type { Address } from "../mail/Address.ts"
import type { Mail, Reply } from "../mail/Smtp.ts"

/** An address and port could not be listened on. */
export class ListenError extends Schema.TaggedError<ListenError>()("ListenError", {
  reason: Schema.Literals(["in use", "not permitted", "no such address", "other"]),
  address: Schema.String,
  port: Schema.Int,
  cause: Schema.Defect()
}) {
  override get message(): string {
    return `cannot listen on ${this.address} port ${this.port}: ${this.reason}`
  }
}

/** Where to listen; port 0 = any that is free. */
export interface Listener {
  readonly name: string
  readonly address: string
  readonly port: number
}

/** What one host takes on, all listeners together. */
export interface Limits {
  /** Octets of a message; announced with SIZE. */
  readonly messageBytes: number
  /** Octets of a line of a message. */
  readonly lineBytes: number
  /** Recipients of a message (RFC 5321 section 4.5.3.1.8 asks for at least 100). */
  readonly recipients: number
  readonly connections: number
  /** Of one source: an IPv4 address or an IPv6 /64. */
  readonly connectionsPerSource: number
  /** Networks without a limit per source, `127.0.0.0/8`. */
  readonly exempt: ReadonlyArray<string>
  /** The part of `connections` and `memoryBytes` that one source may have, above 0 to 1. */
  readonly sourceShare: number
  /** Octets of all messages that are in memory. */
  readonly memoryBytes: number
  /** For a whole command line, however the octets come. */
  readonly commandTimeout: Duration.Duration
  /** Between two segments of a message. */
  readonly dataTimeout: Duration.Duration
  /** The least progress of a message, octets per second over a minute. */
  readonly minBytesPerSecond: number
  readonly handshakeTimeout: Duration.Duration
  readonly sessionTimeout: Duration.Duration
  /** Negative replies that end a session. */
  readonly errors: number
  /** NOOP, RSET and the like since the last message; each further one counts as an error. */
  readonly idleCommands: number
  /** Unknown recipients of a session that are answered at once. */
  readonly unknownRecipients: number
  /** What each further one waits for its answer, outside the networks of `exempt`. */
  readonly unknownDelay: Duration.Duration
  /** How long messages on their way in may take to finish when the server goes down. */
  readonly stopGrace: Duration.Duration
}

/** What to serve. */
export interface Service {
  readonly hostname: string
  readonly listeners: ReadonlyArray<Listener>
  /** Certificate chain and key in PEM; undefined = STARTTLS is not offered. */
  readonly tls: { readonly cert: string; readonly key: string } | undefined
  readonly limits: Limits
}

/** The other end of a session. */
export interface Client {
  readonly ip: string
  readonly port: number
  /** As given with EHLO or HELO; without control characters. */
  readonly helo: string
  /** EHLO, not HELO. */
  readonly isExtended: boolean
  readonly tls: { readonly version: string; readonly cipher: string } | undefined
  /** Name of the listener. */
  readonly listener: string
}

/** A message that came in whole. */
export interface Incoming {
  readonly client: Client
  readonly mail: Mail
  /** 1 or more, each accepted by the policy, none twice. */
  readonly recipients: ReadonlyArray<Address>
  /** CRLF lines without NUL, bare CR and bare LF. Valid until the reply is given. */
  readonly octets: Uint8Array
}

/** Decides. A defect is answered with 451 and logged. */
export interface Policy {
  /** A positive reply accepts the recipient. */
  readonly recipient: (address: Address) => Effect.Effect<Reply>
  /** The reply to the whole message. Never interrupted. */
  readonly message: (incoming: Incoming) => Effect.Effect<Reply>
}

export class SmtpServer extends Context.Service<
  SmtpServer,
  {
    /**
     * Listens until the scope closes; then sessions that are sending a message may finish, all
     * others are told 421, and no message handed to the policy is left without its reply.
     * Returns the listeners with the ports they got.
     */
    readonly serve: (
      service: Service,
      policy: Policy
    ) => Effect.Effect<ReadonlyArray<Listener>, ListenError, Scope.Scope>
  }
>()("pepsi/services/SmtpServer") {}
